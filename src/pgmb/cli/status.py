"""pgmb status, and the tables that other commands show too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import typer
from rich.table import Table

from pgmb import Broker, QueueStatus, ReaderStatus, SinkStatus, StreamStatus, connect
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn
from pgmb.doctor.finding import Limits, ago

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
_READER = {
    "reader": "reader",
    "stream": "stream",
    "waiting": "waiting",
    "waiting_bytes": "bytes",
    "lag": "lag",
    "confirmed_at": "confirmed",
    "held_segments": "holds segments",
    "held_for": "for",
    "lost": "lost events",
}
_SINK = {
    "app": "app",
    "stream": "stream",
    "version": "version",
    "events": "events",
    "committed_at": "committed",
    "stages": "stages",
    "staged_at": "staged",
}

_BROKER = "select coalesce(maintained_age, age), endpoints, dispatchers from pgmb.describe_broker()"
_UNKEPT_FOR = Limits().unkept_for


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Show streams, queues, durable readers and sinks: backlog, age, leases and dead letters."""
    with connect(dsn, max_size=1) as broker:
        streams, queues = broker.stream_status(), broker.queue_status()
        readers, sinks = broker.reader_status(), broker.sink_status()
        missing = idle(broker)
    if as_json:
        output.json({"streams": streams, "queues": queues, "readers": readers, "sinks": sinks})
        return
    console = output.console()
    console.print(stream_table(streams))
    console.print(queue_table(queues))
    if readers:
        console.print(reader_table(readers))
    if sinks:
        console.print(sink_table(sinks))
    for line in missing.values():
        output.note(line)


def idle(broker: Broker) -> dict[str, str]:
    """What nobody does and should: a line for `upkeep`, and one for `dispatcher`."""
    with broker.own_connection() as conn:
        ((since, endpoints, dispatchers),) = conn.execute(_BROKER).fetchall()
    found: dict[str, str] = {}
    if since is not None and since > _UNKEPT_FOR:
        found["upkeep"] = (
            f"Nobody does the upkeep: pgmb.maintain() did not run for {ago(since)}."
            " Run pgmb work or pgmb serve."
        )
    if endpoints and not dispatchers:
        these = "1 endpoint" if endpoints == 1 else f"{endpoints:,} endpoints"
        found["dispatcher"] = (
            f"No dispatcher runs: nothing posts the events of {these}. Run pgmb serve, or pgmb dispatcher."
        )
    return found


def queue_table(found: Sequence[QueueStatus]) -> Table:
    rows = [[*(output.bounded(one, name) for name in _QUEUE), paused(one)] for one in found]
    return output.tabulate("Queues", [*_QUEUE.values(), "paused"], rows)


def stream_table(found: Sequence[StreamStatus]) -> Table:
    rows = [[output.bounded(one, name) for name in _STREAM] for one in found]
    return output.tabulate("Streams", [*_STREAM.values()], rows)


def reader_table(found: Sequence[ReaderStatus]) -> Table:
    return output.tabulate("Readers", [*_READER.values()], [_cells(one, _READER) for one in found])


def sink_table(found: Sequence[SinkStatus]) -> Table:
    # A version is a name, such as a date: it has no thousands.
    rows = [
        [str(cell) if name == "version" and cell is not None else cell for name, cell in cells]
        for cells in (zip(_SINK, _cells(one, _SINK), strict=True) for one in found)
    ]
    return output.tabulate("Sinks", [*_SINK.values()], rows)


def paused(queue: QueueStatus) -> str | None:
    """Why a queue is paused, or that it is; None while it delivers."""
    return None if queue.paused_at is None else queue.paused_reason or "yes"


def _cells(one: msgspec.Struct, columns: dict[str, str]) -> list[object]:
    return [getattr(one, name) for name in columns]
