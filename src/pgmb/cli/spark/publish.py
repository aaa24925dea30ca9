"""pgmb spark publish: files of rows into a stream."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from pgmb import SinkStatus, connect
from pgmb.cli import output
from pgmb.cli.options import Dsn, Stream
from pgmb.cli.spark import files
from pgmb.cli.spark.counting import counted
from pgmb.cli.spark.progress import progress
from pgmb.cli.spark.session import UNTOLD, Conf, Master, session


def publish(
    path: Annotated[Path, typer.Argument(help="A file, or a folder of them: Parquet, CSV or JSON lines.")],
    dsn: Dsn = "",
    stream: Stream = "main",
    kind: Annotated[
        files.Format | None,
        typer.Option(
            "--format",
            metavar="parquet|csv|jsonl",
            help="By default as the path's name says.",
            show_default=False,
        ),
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Of rows that have none.")] = None,
    topic_column: Annotated[str | None, typer.Option(metavar="NAME", show_default="topic")] = None,
    key_column: Annotated[str | None, typer.Option(metavar="NAME", show_default="key")] = None,
    payload_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Without one, the columns that are nothing else are the payload's fields.",
            show_default="payload",
        ),
    ] = None,
    headers_column: Annotated[str | None, typer.Option(metavar="NAME", show_default="headers")] = None,
    id_column: Annotated[str | None, typer.Option(metavar="NAME", show_default="id")] = None,
    at_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="When an event is due.", show_default=False)
    ] = None,
    app: Annotated[
        str | None, typer.Option(help="With --version: publish nothing if that was published already.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Of what --app publishes: higher each time.", min=0)
    ] = None,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Publish rows of files, all or none, and print how many. A column named "" is none."""
    if (app is None) != (version is None):
        raise typer.BadParameter("--app and --version go together")
    if not path.exists():
        output.fail(f"{path} does not exist", None)
    chosen = files.chosen(str(path), kind)
    columns = {
        role: name
        for role, name in (
            ("topic", topic_column),
            ("key", key_column),
            ("payload", payload_column),
            ("headers", headers_column),
            ("id", id_column),
            ("at", at_column),
        )
        if name is not None
    }
    options = {"url": dsn or UNTOLD, "stream": stream, **({} if topic is None else {"topic": topic})}
    if app is not None and version is not None:
        options |= {"txnAppId": app, "txnVersion": str(version)}
    # Said before Spark starts, if there is no such database or nothing to do.
    with connect(dsn, max_size=1) as broker:
        sinks = broker.sink_status()
    if _published(sinks, app, stream, version):
        output.note(f"{app} has published version {version} already.")
        output.line("0")
        return
    if chosen is not files.Format.JSONL:
        options |= {f"{role}Column": name for role, name in columns.items()}
    with session(master, conf) as spark:
        rows, count = counted(files.opened(spark, str(path), chosen, columns))
        with progress(spark, "Publish"):
            rows.write.format("pgmb").options(**options).mode("append").save()
        total = count()
    output.line(str(total))


def _published(sinks: Iterable[SinkStatus], app: str | None, stream: str, version: int | None) -> bool:
    known = (one.version for one in sinks if (one.app, one.stream) == (app, stream))
    return version is not None and any(last is not None and last >= version for last in known)
