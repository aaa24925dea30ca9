"""Operations that publish: one event, many, JSON lines or CloudEvents. A request is published as a whole."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from pgmb import types
from pgmb._core.statements import interval
from pgmb.errors import translated
from pgmb.server.problems import Problem
from pgmb.server.rest import cloudevents
from pgmb.server.rest import parsing as reading
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import Given, NewEvent, StreamName

operations = Operations("publish")

JSON_LINES: Final = "application/x-ndjson"

_CLAIM: Final = (
    "select given.place, pgmb.claim_key(%(stream)s, given.key, given.id, interval '1 day') from ("
    " select * from unnest(%(places)s::bigint[], %(keys)s::text[], %(ids)s::uuid[]) given (place, key, id)"
    ' order by given.key collate "C", given.place) given'
)


class NewEvents(Given):
    """Events to publish in order, all or none."""

    events: Annotated[list[NewEvent], msgspec.Meta(min_length=1)]


class Published(msgspec.Struct):
    """The events' ids in order. A duplicate `dedup_key` returns the id of the first event."""

    ids: list[UUID]


class _Probe(msgspec.Struct):
    events: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_probe = msgspec.json.Decoder(_Probe).decode
_one = msgspec.json.Decoder(NewEvent).decode
_many = msgspec.json.Decoder(NewEvents).decode
_lines = msgspec.json.Decoder(NewEvent).decode_lines

MEDIA: Final = {
    reading.JSON: (NewEvent, NewEvents),
    JSON_LINES: (NewEvent,),
    cloudevents.STRUCTURED: (cloudevents.Document,),
    cloudevents.BATCH: (list[cloudevents.Document],),
}


@operations.add("POST", "/v1/streams/{stream}/events", Need("publish", "stream"), media=MEDIA)
async def publish(call: Call, stream: StreamName, body: bytes) -> Published:
    """Publish events: one, several, JSON lines, or CloudEvents, structured, in a batch, or in headers.

    All of a request are published, or none is.
    """
    events = reading.checked(lambda: _events(call, body), "body")
    most = call.context.limits.events
    if len(events) > most:
        raise Problem(413, "too_many_events", f"a request may have at most {most} events")
    if len(events) == 1:
        return Published([await _publish_one(call, stream, events[0])])
    with translated():
        async with call.broker.own_connection() as conn, conn.transaction():
            return Published(await _publish_all(call, conn, stream, events))


def _events(call: Call, body: bytes) -> list[NewEvent]:
    named = reading.media_type(call.request)
    if named == cloudevents.STRUCTURED:
        return [cloudevents.structured(body)]
    if named == cloudevents.BATCH:
        return _some(cloudevents.batch(body))
    if named == JSON_LINES:
        return _some(_lines(body))
    if "ce-specversion" in call.request.headers and (cloudevents.is_json(named) or not named):
        return [cloudevents.binary(call.request.headers, named, body)]
    if named != reading.JSON:
        raise reading.unsupported(MEDIA)
    if _probe(body).events is msgspec.UNSET:
        return [_one(body)]
    return list(_many(body).events)


def _some(events: list[NewEvent]) -> list[NewEvent]:
    if not events:
        raise ValueError("the request contains no events")
    return events


async def _publish_one(call: Call, stream: str, event: NewEvent) -> UUID:
    return await call.broker.publish(
        event.topic,
        event.payload,
        key=event.key,
        headers=event.headers,
        stream=stream,
        id=event.id,
        delay=event.delay,
        dedup_key=event.dedup_key,
    )


async def _publish_all(
    call: Call, conn: AsyncConnection[Any], stream: str, events: Sequence[NewEvent]
) -> list[UUID]:
    ids = [event.id or _fresh_id() for event in events]
    earlier = await _claim_keys(conn, stream, events, ids)
    now: list[types.NewEvent] = []
    for place, (event, id) in enumerate(zip(events, ids, strict=True)):
        if place in earlier:
            continue
        if interval(event.delay):
            await call.broker.publish(
                event.topic,
                event.payload,
                key=event.key,
                headers=event.headers,
                stream=stream,
                id=id,
                delay=event.delay,
                conn=conn,
            )
        else:
            now.append(types.NewEvent(event.topic, event.payload, event.key, event.headers, id))
    if now:
        await call.broker.publish_many(now, stream=stream, conn=conn)
    return [earlier.get(place, id) for place, id in enumerate(ids)]


async def _claim_keys(
    conn: AsyncConnection[Any], stream: str, events: Sequence[NewEvent], ids: Sequence[UUID]
) -> dict[int, UUID]:
    """The ids of earlier events with these keys, by index. Keys are claimed in order, to avoid deadlocks."""
    places = [place for place, event in enumerate(events) if event.dedup_key is not None]
    if not places:
        return {}
    cursor = conn.cursor(row_factory=tuple_row)
    await cursor.execute("select pgmb.stream_id(%s)", (stream,))
    await cursor.execute(
        _CLAIM,
        {
            "stream": stream,
            "places": places,
            "keys": [events[place].dedup_key for place in places],
            "ids": [ids[place] for place in places],
        },
    )
    return {place: id for place, id in await cursor.fetchall() if id is not None}


def _fresh_id() -> UUID:
    """A version 7 UUID."""
    milliseconds = time.time_ns() // 1_000_000
    return UUID(
        int=milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    )
