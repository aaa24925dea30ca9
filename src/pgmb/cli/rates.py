"""What happened between two looks at a broker. No I/O."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from pgmb import QueueStatus, ReaderStatus, StreamStatus


class Activity(msgspec.Struct, frozen=True):
    """What a queue's receives amount to, as pgmb.queue_activity tells."""

    receives: int
    events_per_receive: float


class Look(msgspec.Struct, frozen=True):
    at: datetime
    clock: float
    """Seconds of a clock that never jumps."""
    streams: list[StreamStatus]
    queues: list[QueueStatus]
    readers: list[ReaderStatus]
    activity: dict[str, Activity]


class StreamRow(msgspec.Struct, frozen=True):
    stream: str
    published_per_second: float | None
    events: int
    segments: int
    unsealed: int
    delayed: int
    last_tick_age: timedelta | None
    at_least: list[str]


class QueueRow(msgspec.Struct, frozen=True):
    queue: str
    stream: str
    received_per_second: float
    waiting: int
    oldest_age: timedelta | None
    leases: int
    leased_events: int
    retries: int
    dead: int
    dead_per_second: float | None
    paused: str | None
    at_least: list[str]
    at_most: list[str]


class ReaderRow(msgspec.Struct, frozen=True):
    reader: str
    stream: str
    read_per_second: float | None
    waiting: int
    waiting_bytes: int
    lag: timedelta | None
    confirmed_age: timedelta
    held_for: timedelta | None


class Frame(msgspec.Struct, frozen=True):
    at: datetime
    streams: list[StreamRow]
    queues: list[QueueRow]
    readers: list[ReaderRow]


def frame(before: Look | None, now: Look) -> Frame:
    """What to show of `now`, with rates since `before`; without it, by what the database remembers."""
    seconds = 0.0 if before is None else max(now.clock - before.clock, 1e-3)
    streams = {} if before is None else {one.stream: one for one in before.streams}
    queues = {} if before is None else {one.queue: one for one in before.queues}
    return Frame(
        now.at,
        [_stream(streams.get(one.stream), one, seconds) for one in now.streams],
        [
            _queue(queues.get(one.queue), one, _received(before, now, one, seconds), seconds)
            for one in now.queues
        ],
        [_reader(one, _read(before, now, one, seconds), now.at) for one in now.readers],
    )


def _stream(before: StreamStatus | None, now: StreamStatus, seconds: float) -> StreamRow:
    # Fewer than before: retention dropped a segment in between.
    counted = before is not None and now.events >= before.events
    rate = (
        (now.events - before.events) / seconds if before is not None and counted else now.published_per_second
    )
    return StreamRow(
        *(now.stream, rate, now.events, now.segments, now.unsealed, now.delayed, now.last_tick_age),
        now.at_least,
    )


def _received(before: Look | None, now: Look, queue: QueueStatus, seconds: float) -> float:
    """Counted by receives: the leases themselves may be settled and cleared between two looks."""
    earlier = None if before is None else before.activity.get(queue.queue)
    later = now.activity.get(queue.queue)
    if earlier is None or later is None or later.receives < earlier.receives:
        return queue.received_per_second
    return (later.receives - earlier.receives) * later.events_per_receive / seconds


def _queue(before: QueueStatus | None, now: QueueStatus, received: float, seconds: float) -> QueueRow:
    known = "dead" not in now.at_least
    died = max(now.dead - before.dead, 0) / seconds if before is not None and known else None
    return QueueRow(
        now.queue,
        now.stream,
        received,
        now.waiting,
        now.oldest_age,
        now.leases,
        now.leased_events,
        now.retries,
        now.dead,
        died,
        None if now.paused_at is None else now.paused_reason or "yes",
        now.at_least,
        now.at_most,
    )


def _read(before: Look | None, now: Look, reader: ReaderStatus, seconds: float) -> float | None:
    """By what was published, and how much more or less of it waits. Unknown where retention dropped some."""
    if before is None:
        return None
    earlier = {(one.reader, one.stream): one.waiting for one in before.readers}.get(
        (reader.reader, reader.stream)
    )
    published = _events(now, reader.stream) - _events(before, reader.stream)
    if earlier is None or published < 0:
        return None
    return max(published + earlier - reader.waiting, 0) / seconds


def _events(look: Look, stream: str) -> int:
    return next((one.events for one in look.streams if one.stream == stream), 0)


def _reader(now: ReaderStatus, read: float | None, at: datetime) -> ReaderRow:
    return ReaderRow(
        now.reader,
        now.stream,
        read,
        now.waiting,
        now.waiting_bytes,
        now.lag,
        max(at - now.confirmed_at, timedelta(0)),
        now.held_for,
    )
