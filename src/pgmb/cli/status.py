"""pgmb status."""

from __future__ import annotations

import msgspec
import typer

from pgmb import connect
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn

_QUEUE = (
    "queue",
    "stream",
    "waiting",
    "oldest_age",
    "leased_events",
    "retries",
    "dead",
    "received_per_second",
    "paused_reason",
)
_STREAM = (
    "stream",
    "events",
    "segments",
    "unsealed",
    "delayed",
    "published_per_second",
    "last_tick_age",
    "bytes",
)


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Streams and queues: what waits, for how long, what is leased, retried and dead."""
    with connect(dsn, max_size=1) as broker:
        streams, queues = broker.stream_status(), broker.queue_status()
    if as_json:
        output.json({"streams": streams, "queues": queues})
        return
    for title, columns, found in (("Streams", _STREAM, streams), ("Queues", _QUEUE, queues)):
        rows = [msgspec.structs.asdict(one) for one in found]
        headings = [name.replace("_", " ") for name in columns]
        output.table(title, headings, [[row[name] for name in columns] for row in rows])
