"""Publish many events: by arrays up to a block, by COPY beyond."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain, islice, repeat
from struct import Struct
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from psycopg import sql

from pgmb._core import wire
from pgmb._core.statements import Statement, publish_columns, publish_uniform
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, NewEvent

Item = TypeVar("Item")

BLOCK_EVENTS = 2000
"""How many events go in one call with arrays; more are copied, in blocks of as many.

Measured with events of 167 bytes, thousands a second of wall, of client CPU, of server CPU:
       500 events    arrays  93, 560, 111    COPY 112, 586, 133
     2,000 events    arrays 126, 719, 154    COPY 130, 882, 154
    50,000 events    arrays  75, 587,  99    COPY 127, 508, 143
COPY costs one round trip more, which a unix socket does not show: so arrays for as long as they keep up.
"""

ONE_DAY = timedelta(days=1)
"""How long a deduplication key is remembered unless told."""

_NOTHING = (None, None, None, None)
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_field_count = Struct("!h").pack
_length = Struct("!i").pack


class Copy(NamedTuple):
    """A COPY statement and the data to write, made as it is asked for."""

    text: sql.Composed
    data: Iterator[bytes]
    stream: str


class Parts(NamedTuple):
    """Statements and copies for one transaction, each made once the one before it is done."""

    steps: Iterator[Statement | Copy]


def plan(
    topic: str | Iterable[NewEvent],
    payloads: Iterable[Any] | None,
    headers: Any,
    stream: str,
    dedup_for: Duration = ONE_DAY,
) -> Statement | Copy | Parts:
    """The way to publish payloads of one topic, or, without payloads, events with all of their own."""
    for given, expected in ((payloads, "payloads"), (None if isinstance(topic, str) else topic, "events")):
        # They can be iterated, too: over characters, numbers and keys.
        if isinstance(given, str | bytes | bytearray | memoryview | Mapping):
            raise InvalidArgument(f"{expected} must be a list or an iterator, got {type(given).__name__}")
    if isinstance(topic, str):
        if payloads is None:
            raise InvalidArgument("a topic needs payloads: publish_many(topic, payloads)")
        return _plan_uniform(topic, payloads, wire.optional_json(headers), stream)
    if payloads is not None or headers is not None:
        raise InvalidArgument("events have their own payloads and headers: publish_many(events)")
    return _plan_events(topic, stream, dedup_for)


def _plan_uniform(
    topic: str, payloads: Iterable[Any], headers: wire.Json | None, stream: str
) -> Statement | Copy:
    wire.refuse_other_than_text(topic, None)
    first, rest = _begin(payloads)
    if rest is None:
        encoded = wire.encode_all(first)
        if sum(map(len, encoded)) <= wire.BATCH_BYTES:
            return publish_uniform(topic, encoded, headers, stream)
        rest = iter(())
    return _copy(
        stream,
        ("topic", "headers", "payload"),
        (_uniform_rows(topic, headers, block) for block in chain((first,), _blocks(rest))),
    )


def _plan_events(events: Iterable[NewEvent], stream: str, dedup_for: Duration) -> Statement | Copy | Parts:
    first, rest = _begin(events)
    if not set(map(type, first)) <= {NewEvent}:
        _refuse_other_events(first)
    if rest is None:
        topic = _uniform_topic(first)
        if topic is not None:
            return _plan_uniform(topic, [event.payload for event in first], None, stream)
        columns = _Columns.of(first)
        if columns.bytes <= wire.BATCH_BYTES:
            return _columns(columns, first, stream, dedup_for)
        rest = iter(())
    return Parts(_steps(chain((first,), _blocks(rest)), stream, dedup_for))


def _refuse_other_events(events: Iterable[object]) -> None:
    for event in events:
        if not isinstance(event, NewEvent):
            raise InvalidArgument(f"events must be NewEvent, got {event!r}")
        wire.refuse_other_than_text(event.topic, event.key, event.dedup_key)


def _keyed(events: Sequence[NewEvent], stream: str, dedup_for: Duration) -> Iterator[Statement]:
    """Statements for a block with deduplication keys, none of which is too large for one message."""
    columns = _Columns.of(events)
    if columns.bytes <= wire.BATCH_BYTES or len(events) == 1:
        yield _columns(columns, events, stream, dedup_for)
        return
    middle = len(events) // 2
    yield from _keyed(events[:middle], stream, dedup_for)
    yield from _keyed(events[middle:], stream, dedup_for)


def _columns(columns: _Columns, events: Sequence[NewEvent], stream: str, dedup_for: Duration) -> Statement:
    try:
        dedup_keys = _column(
            None if event.dedup_key is None else event.dedup_key.encode() for event in events
        )
    except AttributeError:
        _refuse_other_events(events)
        raise
    return publish_columns(
        columns.topics,
        columns.payloads,
        columns.keys,
        columns.headers,
        columns.ids,
        stream,
        dedup_keys,
        dedup_for,
    )


def _steps(blocks: Iterator[list[NewEvent]], stream: str, dedup_for: Duration) -> Iterator[Statement | Copy]:
    """A copy of all blocks, interrupted by those with a deduplication key, which COPY knows nothing of."""
    keyed: list[list[NewEvent]] = []

    def rows(block: list[NewEvent]) -> Iterator[bytes]:
        yield _rows(_Columns.of(block))
        for block in blocks:
            if _has_keys(block):
                keyed.append(block)
                return
            yield _rows(_Columns.of(block))

    for block in blocks:
        if _has_keys(block):
            keyed.append(block)
        else:
            yield _copy(stream, ("topic", "payload", "key", "headers", "id"), rows(block))
        while keyed:
            yield from _keyed(keyed.pop(), stream, dedup_for)


def _has_keys(events: Sequence[NewEvent]) -> bool:
    return any(event.dedup_key is not None for event in events)


def _begin(items: Iterable[Item]) -> tuple[list[Item], Iterator[Item] | None]:
    """The first block, and what follows if there is more."""
    source = iter(items)
    first = list(islice(source, BLOCK_EVENTS))
    following = list(islice(source, 1))
    return first, chain(following, source) if following else None


def _blocks(source: Iterator[Item]) -> Iterator[list[Item]]:
    while block := list(islice(source, BLOCK_EVENTS)):
        yield block


def _copy(stream: str, columns: Sequence[str], rows: Iterator[bytes]) -> Copy:
    text = sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier("pgmb", f"log_{stream}"), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    return Copy(text, chain((_HEADER,), rows, (_TRAILER,)), stream)


def _uniform_topic(events: Sequence[NewEvent]) -> str | None:
    """The topic that all the events share, if it is all they have besides their payloads.

    A scalar topic instead of an array makes the server's part cheaper by a third.
    """
    if not events:
        return None
    topic = events[0].topic
    for event in events:
        if (event.topic, event.key, event.headers, event.id, event.dedup_key) != (topic, *_NOTHING):
            return None
    return topic


class _Columns(msgspec.Struct, frozen=True):
    """Events column by column. A column that is null throughout is None."""

    topics: list[bytes]
    payloads: list[bytes]
    keys: list[bytes | None] | None
    headers: list[bytes | None] | None
    ids: list[bytes | None] | None

    @property
    def bytes(self) -> int:
        """Of payloads and headers."""
        return sum(map(len, self.payloads)) + sum(len(one or b"") for one in self.headers or ())

    @classmethod
    def of(cls, events: Sequence[NewEvent]) -> _Columns:
        try:
            topics = [event.topic.encode() for event in events]
            keys = _column(None if event.key is None else event.key.encode() for event in events)
        except AttributeError:
            _refuse_other_events(events)
            raise
        return cls(
            topics,
            wire.encode_all([event.payload for event in events]),
            keys,
            _column(wire.optional_json(event.headers) for event in events),
            _column(None if event.id is None else event.id.bytes for event in events),
        )


def _column(items: Iterable[bytes | None]) -> list[bytes | None] | None:
    column = list(items)
    return column if any(item is not None for item in column) else None


def _uniform_rows(topic: str, headers: wire.Json | None, payloads: Sequence[Any]) -> bytes:
    before = _field_count(3) + b"".join(wire.fields((topic.encode(), headers)))
    encoded = wire.encode_all(payloads)
    return b"".join(
        chain.from_iterable(zip(repeat(before), map(_length, map(len, encoded)), encoded, strict=False))
    )


def _rows(columns: _Columns) -> bytes:
    nothing = cast("Iterator[bytes | None]", repeat(None))
    count = _field_count(5)
    rows = zip(
        columns.topics,
        columns.payloads,
        columns.keys or nothing,
        columns.headers or nothing,
        columns.ids or nothing,
        strict=False,
    )
    return b"".join(chain.from_iterable((count, *wire.fields(row)) for row in rows))
