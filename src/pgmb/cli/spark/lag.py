"""pgmb spark lag: how late readers are, for people and for monitoring."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated

import psycopg
import typer
from psycopg_pool import PoolTimeout

from pgmb import ReaderStatus, connect
from pgmb.cli import durations, hints, output, status
from pgmb.cli.options import AsJson, Dsn

_COULD_NOT_CHECK = 3


def lag(
    readers: Annotated[
        list[str] | None,
        typer.Argument(help="Only these: the readerName of queries. By default all.", show_default=False),
    ] = None,
    dsn: Dsn = "",
    max_lag: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="Exit with 1 if a reader is further behind or lost events.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the backlog and lag of durable readers. Exit code: 0, 1 too late, 3 could not check."""
    try:
        with connect(dsn, max_size=1) as broker:
            found = [one for one in broker.reader_status() if not readers or one.reader in readers]
    except (psycopg.OperationalError, PoolTimeout) as error:
        output.fail(*hints.connection_failure(error), _COULD_NOT_CHECK)
    if as_json:
        output.json(found)
    elif found:
        output.console().print(status.reader_table(found))
    elif not readers:
        output.line("No durable readers. A query with the option readerName is one.")
    missing = set(readers or ()) - {one.reader for one in found}
    if missing:
        output.fail(
            f"no reader {', '.join(sorted(missing))}",
            "A query with the option readerName is one once it has begun.",
        )
    if max_lag is not None:
        _judge(found, max_lag)


def _judge(found: Sequence[ReaderStatus], limit: timedelta) -> None:
    late = [one for one in found if one.lost or (one.lag or timedelta(0)) > limit]
    if late:
        told = (
            f"{one.reader} of stream {one.stream} "
            + ("lost events" if one.lost else f"is {durations.show(one.lag or timedelta(0))} late")
            for one in late
        )
        output.fail(", ".join(told), None)
