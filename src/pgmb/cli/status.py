"""pgmb status, and the tables of streams and queues that other commands show too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer
from rich.table import Table

from pgmb import QueueStatus, StreamStatus, connect
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn

_QUEUE = {
    "queue": "queue",
    "stream": "stream",
    "waiting": "waiting",
    "oldest_age": "oldest",
    "leases": "leases",
    "leased_events": "leased",
    "retries": "retries",
    "dead": "dead",
    "received_per_second": "received/s",
}
_STREAM = {
    "stream": "stream",
    "events": "events",
    "segments": "segments",
    "unsealed": "unsealed",
    "delayed": "delayed",
    "published_per_second": "published/s",
    "last_tick_age": "last tick",
    "bytes": "bytes",
}


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Streams and queues: what waits, for how long, what is leased, retried and dead."""
    with connect(dsn, max_size=1) as broker:
        streams, queues = broker.stream_status(), broker.queue_status()
    if as_json:
        output.json({"streams": streams, "queues": queues})
        return
    console = output.console()
    console.print(stream_table(streams))
    console.print(queue_table(queues))


def queue_table(found: Sequence[QueueStatus]) -> Table:
    rows = [[*_cells(one, _QUEUE), paused(one)] for one in found]
    return output.tabulate("Queues", [*_QUEUE.values(), "paused"], rows)


def stream_table(found: Sequence[StreamStatus]) -> Table:
    return output.tabulate("Streams", [*_STREAM.values()], [_cells(one, _STREAM) for one in found])


def paused(queue: QueueStatus) -> str | None:
    """Why a queue is paused, or that it is; None while it delivers."""
    return None if queue.paused_at is None else queue.paused_reason or "yes"


def _cells(one: msgspec.Struct, columns: dict[str, str]) -> list[object]:
    return [getattr(one, name) for name in columns]
