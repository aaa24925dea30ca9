"""Publish many events: by arrays up to a block, by COPY beyond."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain, islice, repeat
from struct import Struct
from typing import Any, NamedTuple, Protocol

import msgspec
from psycopg import sql

from pgmb._core import wire
from pgmb._core.statements import Statement, publish_columns, publish_uniform
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, NewEvent

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

_FIRST_TOGETHER = 32
"""How many events are encoded by one call at first."""
_ENCODED_BYTES = 1 << 20
"""After that as many as have this size: what an iterator gives is held until then."""
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_field_count = Struct("!h").pack
_length = Struct("!i").pack


class Block(Protocol):
    """Encoded events that go together."""

    def rows(self) -> bytes:
        """For COPY, which cannot deduplicate."""
        ...

    def publish(self, stream: str, dedup_for: Duration) -> Statement: ...


class Copy(NamedTuple):
    """A COPY statement and the blocks to write, made as they are asked for."""

    text: sql.Composed
    blocks: Iterator[Block]
    stream: str

    @property
    def data(self) -> Iterator[bytes]:
        return chain((_HEADER,), (block.rows() for block in self.blocks), (_TRAILER,))

    @property
    def statements(self) -> Iterator[Statement]:
        """The same without COPY."""
        return (block.publish(self.stream, ONE_DAY) for block in self.blocks)


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
    blocks = _uniform_blocks(topic, payloads, headers)
    first, second = next(blocks, _Uniform(topic, headers)), next(blocks, None)
    if second is None and first.size <= wire.BATCH_BYTES:
        return first.publish(stream, dedup_for=ONE_DAY)
    every = chain((first,), () if second is None else (second,), blocks)
    return _copy(stream, ("topic", "headers", "payload"), every)


class _Uniform(msgspec.Struct):
    """Encoded payloads of one topic."""

    topic: str
    headers: wire.Json | None
    payloads: list[bytes] = []
    size: int = 0

    def publish(self, stream: str, dedup_for: Duration) -> Statement:
        return publish_uniform(self.topic, self.payloads, self.headers, stream)

    def rows(self) -> bytes:
        before = _field_count(3) + b"".join(wire.fields((self.topic.encode(), self.headers)))
        rows = zip(repeat(before), map(_length, map(len, self.payloads)), self.payloads, strict=False)
        return b"".join(chain.from_iterable(rows))


def _together(events: int, size: int) -> int:
    """How many events to encode next, after so many of that size."""
    return max(1, events * _ENCODED_BYTES // (size + 1))


def _uniform_blocks(topic: str, payloads: Iterable[Any], headers: wire.Json | None) -> Iterator[_Uniform]:
    """Payloads in blocks that end by their number or their bytes."""
    source = iter(payloads)
    block, together = _Uniform(topic, headers), _FIRST_TOGETHER
    while part := list(islice(source, min(together, BLOCK_EVENTS - len(block.payloads)))):
        encoded = wire.encode_all(part)
        size = sum(map(len, encoded))
        block.payloads += encoded
        block.size += size
        together = _together(len(part), size)
        if len(block.payloads) >= BLOCK_EVENTS or block.size >= wire.BATCH_BYTES:
            yield block
            block = _Uniform(topic, headers)
    if block.payloads:
        yield block


def _plan_events(events: Iterable[NewEvent], stream: str, dedup_for: Duration) -> Statement | Copy | Parts:
    blocks = _blocks(events)
    first, second = next(blocks, _Columns()), next(blocks, None)
    if second is None and first.size <= wire.BATCH_BYTES:
        topic = first.only_topic
        if topic is not None:
            return publish_uniform(topic.decode(), first.payloads, None, stream)
        return first.publish(stream, dedup_for)
    return Parts(_steps(chain((first,), () if second is None else (second,), blocks), stream, dedup_for))


class _Columns(msgspec.Struct):
    """Encoded events, column by column."""

    topics: list[bytes] = []
    payloads: list[bytes] = []
    keys: list[bytes | None] = []
    headers: list[bytes | None] = []
    ids: list[bytes | None] = []
    dedup_keys: list[bytes | None] = []
    size: int = 0
    """Of payloads and headers."""

    def add(self, events: Sequence[NewEvent]) -> int:
        """Returns the bytes of their payloads and headers."""
        if not set(map(type, events)) <= {NewEvent}:
            _refuse_other_events(events)
        try:
            self.topics += [event.topic.encode() for event in events]
            self.keys += [None if event.key is None else event.key.encode() for event in events]
            self.dedup_keys += [
                None if event.dedup_key is None else event.dedup_key.encode() for event in events
            ]
        except AttributeError:
            _refuse_other_events(events)
            raise
        payloads = wire.encode_all([event.payload for event in events])
        headers = [None if event.headers is None else wire.json(event.headers) for event in events]
        self.payloads += payloads
        self.headers += headers
        self.ids += [None if event.id is None else event.id.bytes for event in events]
        size = sum(map(len, payloads)) + sum(map(len, filter(None, headers)))
        self.size += size
        return size

    @property
    def only_topic(self) -> bytes | None:
        """The topic that all events share, if it is all they have besides their payloads.

        A scalar topic instead of an array makes the server's part cheaper by a third.
        """
        others = (self.keys, self.headers, self.ids, self.dedup_keys)
        return self.topics[0] if len(set(self.topics)) == 1 and not any(map(_given, others)) else None

    @property
    def has_dedup_keys(self) -> bool:
        return _given(self.dedup_keys) is not None

    def publish(self, stream: str, dedup_for: Duration) -> Statement:
        return publish_columns(
            self.topics,
            self.payloads,
            _given(self.keys),
            _given(self.headers),
            _given(self.ids),
            stream,
            _given(self.dedup_keys),
            dedup_for,
        )

    def rows(self) -> bytes:
        count = _field_count(5)
        columns = zip(self.topics, self.payloads, self.keys, self.headers, self.ids, strict=True)
        return b"".join(chain.from_iterable((count, *wire.fields(row)) for row in columns))

    def halves(self) -> tuple[_Columns, _Columns]:
        middle = len(self.topics) // 2
        return self._part(slice(middle)), self._part(slice(middle, None))

    def _part(self, part: slice) -> _Columns:
        payloads, headers = self.payloads[part], self.headers[part]
        size = sum(map(len, payloads)) + sum(map(len, filter(None, headers)))
        return _Columns(
            self.topics[part], payloads, self.keys[part], headers, self.ids[part], self.dedup_keys[part], size
        )


def _given(column: list[bytes | None]) -> list[bytes | None] | None:
    """None if it is null throughout."""
    return None if column.count(None) == len(column) else column


def _refuse_other_events(events: Iterable[object]) -> None:
    for event in events:
        if not isinstance(event, NewEvent):
            raise InvalidArgument(f"events must be NewEvent, got {event!r}")
        wire.refuse_other_than_text(event.topic, event.key, event.dedup_key)


def _blocks(events: Iterable[NewEvent]) -> Iterator[_Columns]:
    """Events in blocks that end by their number or their bytes."""
    source = iter(events)
    block, together = _Columns(), _FIRST_TOGETHER
    while part := list(islice(source, min(together, BLOCK_EVENTS - len(block.topics)))):
        together = _together(len(part), block.add(part))
        if len(block.topics) >= BLOCK_EVENTS or block.size >= wire.BATCH_BYTES:
            yield block
            block = _Columns()
    if block.topics:
        yield block


def _steps(blocks: Iterator[_Columns], stream: str, dedup_for: Duration) -> Iterator[Statement | Copy]:
    """A copy of all blocks, interrupted by those with a deduplication key, which COPY knows nothing of."""
    keyed: list[_Columns] = []

    def others(block: _Columns) -> Iterator[_Columns]:
        yield block
        for block in blocks:
            if block.has_dedup_keys:
                keyed.append(block)
                return
            yield block

    for block in blocks:
        if block.has_dedup_keys:
            keyed.append(block)
        else:
            yield _copy(stream, ("topic", "payload", "key", "headers", "id"), others(block))
        while keyed:
            yield from _keyed(keyed.pop(), stream, dedup_for)


def _keyed(block: _Columns, stream: str, dedup_for: Duration) -> Iterator[Statement]:
    """Statements for a block with deduplication keys, none of which is too large for one message."""
    if block.size <= wire.BATCH_BYTES or len(block.topics) == 1:
        yield block.publish(stream, dedup_for)
        return
    for half in block.halves():
        yield from _keyed(half, stream, dedup_for)


def _copy(stream: str, columns: Sequence[str], blocks: Iterator[Block]) -> Copy:
    text = sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier("pgmb", f"log_{stream}"), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    return Copy(text, blocks, stream)
