"""Operations on streams: positions, and the events between two positions."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pgmb.server.changes import audited
from pgmb.server.database import rows
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.parsing import position as parsed
from pgmb.server.rest.parsing import taken_elsewhere
from pgmb.server.rest.schemas import (
    Created,
    Duration,
    EventDocument,
    Given,
    Number,
    PositionText,
    Settings,
    StreamName,
    Time,
)
from pgmb.types import StreamStatus

operations = Operations("streams")

READ: Final = Need("read", "stream")
OPERATE: Final = Need("operate")


class Streams(msgspec.Struct):
    streams: list[StreamStatus]


class StreamDocument(msgspec.Struct):
    stream: str
    status: StreamStatus | None
    settings: Settings
    """One for each column of `pgmb.stream`."""


class CreateStream(Given):
    name: StreamName
    rotate_every: Duration | None = None
    rotate_events: Number | None = None
    keep_for: Duration | None = None
    """By default 7 days. Unread events are kept longer, unless drop_unread is true."""
    drop_unread: bool = False
    archive: bool = False
    max_event_bytes: Number | None = None
    """Bytes of an event's payload and headers together, from 1024 to 67108864 (64 MiB, the default)."""


class At(Given):
    at: Time | None = None
    """The newest position recorded at or before this time; by default the current one."""


class Between(Given):
    after: PositionText
    upto: PositionText
    after_seq: Number = 0
    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class PositionDocument(msgspec.Struct):
    stream: str
    position: str


class Events(msgspec.Struct):
    events: list[EventDocument]


@operations.add("GET", "/v1/streams", Need("read", some=True))
async def list_streams(call: Call) -> Streams:
    """List the streams that the key may read: events, segments, rates, size."""
    found = await call.broker.stream_status()
    return Streams([one for one in found if call.principal.may("read", one.stream)])


@operations.add("GET", "/v1/streams/{stream}", READ)
async def show_stream(call: Call, stream: StreamName) -> StreamDocument:
    """Get a stream: its settings and status."""
    settings = await _settings(call, stream)
    found = next((one for one in await call.broker.stream_status() if one.stream == stream), None)
    return StreamDocument(stream, found, settings)


@operations.add("POST", "/v1/streams", OPERATE)
async def create_stream(call: Call, body: CreateStream) -> Created:
    """Create a stream. Creating it again has no effect."""
    existed = any(one.stream == body.name for one in await call.broker.stream_status())
    async with call.changing() as change:
        await call.broker.create_stream(
            body.name,
            rotate_every=body.rotate_every,
            rotate_events=body.rotate_events,
            keep_for=body.keep_for,
            drop_unread=body.drop_unread,
            archive=body.archive,
            max_event_bytes=body.max_event_bytes,
            conn=change.conn,
        )
        if not existed:
            await change.record("create_stream", body.name, **audited(body, "name"))
    return Created(not existed)


@operations.add("GET", "/v1/streams/{stream}/position", READ)
async def position(call: Call, stream: StreamName, query: At) -> PositionDocument:
    """The stream's position now, or at a time. All events committed by then are before it."""
    if query.at is None:
        taken = await call.broker.position(stream)
    else:
        taken = await call.broker.position_at(stream, query.at)
    return PositionDocument(stream, str(taken))


@operations.add("GET", "/v1/streams/{stream}/earliest", READ)
async def earliest(call: Call, stream: StreamName) -> PositionDocument:
    """The position before the stream's first event."""
    return PositionDocument(stream, str(await call.broker.earliest(stream)))


@operations.add("GET", "/v1/streams/{stream}/between", READ, problems=(410,))
async def between(call: Call, stream: StreamName, query: Between) -> Events:
    """The events between two positions, in order; the same pair gives the same events.

    To go on after a full page, pass the last event's `seq` as `after_seq`.
    """
    most = min(query.max, call.context.limits.events)
    after, upto = parsed(query.after), parsed(query.upto)
    with taken_elsewhere():
        found = await call.broker.between(stream, after, upto, query.after_seq, most, lake=False)
    return Events([EventDocument.of(event) for event in found])


async def _settings(call: Call, stream: str) -> dict[str, Any]:
    ((found,),) = await rows(call.broker, "select pgmb.stream_settings(%s)::text", (stream,))
    return msgspec.json.decode(found, type=dict[str, Any])
