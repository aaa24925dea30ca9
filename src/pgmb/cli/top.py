"""pgmb top: streams, queues and readers, live."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import psycopg
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from pgmb import Broker, connect
from pgmb.cli import durations, output
from pgmb.cli.options import Dsn
from pgmb.cli.rates import Activity, Frame, Look, frame
from pgmb.cli.terminal import interruptible, keys, pressed

_STREAMS = ("stream", "published/s", "events", "segments", "unsealed", "delayed", "last tick")
_QUEUES = (
    "queue",
    "received/s",
    "waiting",
    "oldest",
    "leases",
    "leased",
    "retries",
    "dead",
    "dead/s",
    "paused",
)
_READERS = ("reader", "stream", "read/s", "waiting", "bytes", "lag", "confirmed", "holds back")
_ACTIVITY = "select queue, receives, events_per_receive from pgmb.queue_activity()"


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    dsn: Dsn = "",
    interval: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse, metavar="DURATION", help="The refresh interval.", show_default="2s"
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, measured over one interval.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per refresh.")] = False,
) -> None:
    """Watch rates, backlog, age, leases and failures live. Keys: q quits, p pauses."""
    pause = 2.0 if interval is None else max(interval.total_seconds(), 0.1)
    with connect(dsn, max_size=1) as broker, interruptible():
        if once or as_json or not sys.stdout.isatty():
            _print(broker, pause, once, as_json)
        else:
            _watch(broker, pause)


def _print(broker: Broker, pause: float, once: bool, as_json: bool) -> None:
    before = _look(broker)
    while True:
        time.sleep(pause)
        now = _look(broker)
        seen = frame(before, now)
        if as_json:
            output.json(seen)
        else:
            output.console().print(_render(seen))
        if once:
            return
        before = now


def _watch(broker: Broker, pause: float) -> None:
    before, now = None, _look(broker)
    paused = False
    with keys() as keyboard, Live(console=output.console(), screen=True, auto_refresh=False) as live:
        while True:
            if not paused:
                live.update(_render(frame(before, now), keyboard), refresh=True)
            key = None
            until = time.monotonic() + pause
            while key is None and (left := until - time.monotonic()) > 0:
                key = pressed(left, keyboard)
            if key == "q":
                return
            if key == "p":
                paused = not paused
                live.update(_render(frame(before, now), keyboard, paused), refresh=True)
            elif not paused:
                before, now = now, _look(broker)


def _look(broker: Broker) -> Look:
    with broker.own_connection() as conn:
        streams, queues = broker.stream_status(conn=conn), broker.queue_status(conn=conn)
        readers = broker.reader_status(conn=conn)
        try:
            activity = {name: Activity(count, mean) for name, count, mean in conn.execute(_ACTIVITY)}
        except psycopg.errors.InsufficientPrivilege:
            # Then by what the leases that are still there say.
            activity = {}
        return Look(datetime.now(UTC), time.monotonic(), streams, queues, readers, activity)


def _render(seen: Frame, keyboard: bool = False, paused: bool = False) -> RenderableType:
    streams: list[list[Any]] = [
        [
            one.stream,
            one.published_per_second,
            one.events,
            one.segments,
            one.unsealed,
            output.bounded(one, "delayed"),
            one.last_tick_age,
        ]
        for one in seen.streams
    ]
    queues: list[list[Any]] = [
        [
            *(one.queue, one.received_per_second),
            *(output.bounded(one, name) for name in ("waiting", "oldest_age", "leases", "leased_events")),
            *(output.bounded(one, name) for name in ("retries", "dead")),
            *(one.dead_per_second, one.paused),
        ]
        for one in seen.queues
    ]
    readers: list[list[Any]] = [
        [
            *(one.reader, one.stream, one.read_per_second, one.waiting, one.waiting_bytes, one.lag),
            *(one.confirmed_age, one.held_for),
        ]
        for one in seen.readers
    ]
    state = "paused" if paused else seen.at.astimezone().strftime("%H:%M:%S")
    help_line = f"pgmb top  {state}" + ("  q quit, p pause" if keyboard else "")
    return Group(
        Text(help_line, style="bold"),
        output.tabulate("Streams", _STREAMS, streams),
        output.tabulate("Queues", _QUEUES, queues),
        *([output.tabulate("Readers", _READERS, readers)] if readers else []),
    )
