"""pgmb spark read: a stream into files, or onto the screen."""

from __future__ import annotations

import json
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgmb import Position, connect
from pgmb.cli import moments, output
from pgmb.cli.options import Dsn, StreamName
from pgmb.cli.spark import lines
from pgmb.cli.spark.counting import counted
from pgmb.cli.spark.progress import progress
from pgmb.cli.spark.session import UNTOLD, Conf, Master, session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import DataFrame


class Format(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
    SCREEN = "screen"


def read(
    stream: StreamName,
    dsn: Dsn = "",
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; it must not exist yet.")
    ] = None,
    kind: Annotated[
        Format | None,
        typer.Option(
            "--format",
            metavar="parquet|jsonl|screen",
            help="By default parquet into a folder, else screen.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        moments.Moment | None,
        typer.Option("--from", parser=moments.parse, metavar="POINT", help=f"{moments.MEANT}."),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Only these: * is one word, # any number of words.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number.", min=1)] = None,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Read a stream from its earliest event to now: to files, and print how many, or to the screen."""
    chosen = kind or (Format.SCREEN if to is None else Format.PARQUET)
    if to is None and chosen is Format.PARQUET:
        raise typer.BadParameter("--format parquet needs --to FOLDER")
    if to is not None and chosen is Format.SCREEN:
        raise typer.BadParameter("--to is for parquet and jsonl")
    if to is not None and to.exists():
        output.fail(f"{to} exists already", "Name another folder, or remove it first.")
    options = {"url": dsn or UNTOLD, "stream": stream, **_starting(since, stream)}
    if topic:
        options["subscribe"] = ",".join(topic)
    with connect(dsn, max_size=1) as broker:
        # Said before Spark starts, if there is no such database or stream.
        broker.earliest(stream)
    with session(master, conf) as spark:
        found = spark.read.format("pgmb").options(**options).load()
        if to is None:
            _print(found, chosen, limit)
            return
        if limit is not None:
            found = found.limit(limit)
        found, count = counted(found)
        with progress(spark, "Read"):
            if chosen is Format.JSONL:
                found.select(lines.line()).write.text(str(to))
            else:
                found.write.parquet(str(to))
        total = count()
    output.line(str(total))


def _starting(since: moments.Moment | None, stream: str) -> dict[str, str]:
    if since is None:
        return {}
    if isinstance(since.at, Position):
        return {"startingOffsets": json.dumps({stream: str(since.at)})}
    if isinstance(since.at, datetime):
        return {"startingTimestamp": since.at.isoformat()}
    return {"startingOffsets": since.named}


def _print(found: DataFrame, kind: Format, limit: int | None) -> None:
    """In the order of the log: parts come one after another."""
    shown = found.select(lines.line()) if kind is Format.JSONL else found
    rows: Iterable[Any] = shown.toLocalIterator() if limit is None else shown.take(limit)
    for row in rows:
        output.line(row.value if kind is Format.JSONL else _line(row))


def _line(row: Any) -> str:
    """As `pgmb tail` prints it. Spark gives times as this machine's."""
    time = row.published_at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    key = "" if row.key is None else f" [{row.key}]"
    return output.printable(f"{time} {row.topic}{key} {row.payload}")
