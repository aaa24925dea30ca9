"""How values travel: JSON by msgspec, arrays and COPY in PostgreSQL's binary format, rows left undecoded.

psycopg's own way, lists of `Json` and a loader for each cell, makes the client the slowest part. Batches of
500, events a second of client CPU on a busy machine: written at 13,000 and read at 54,000 to 96,000;
like this at 340,000 to 540,000 and 390,000 to 700,000.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import isfinite
from struct import Struct
from typing import Any, ClassVar, TypeAlias
from uuid import UUID

import msgspec
import psycopg
from psycopg import pq
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

from pgmb._core import models
from pgmb.errors import InvalidArgument
from pgmb.types import DeadLetter, Event, EventFate, FailedAttempt, NextEvents, Source, moment

Row: TypeAlias = tuple[Any, ...]
"""One row as `ADAPTERS` reads it: uuid and json as bytes, timestamptz as microseconds."""

_TEXT, _JSON, _UUID = 25, 114, 2950
_NULL = b"\xff\xff\xff\xff"
_length = Struct("!i").pack
_array_header = Struct("!iiIii").pack


def _other(value: Any) -> Any:
    """What msgspec does not know: a pydantic model tells its own form, the rest is refused."""
    dump = getattr(value, "model_dump", None)
    if dump is not None and not isinstance(value, type):
        models.refuse_unreadable(type(value))
        # By alias, as the model reads it.
        return dump(mode="json", by_alias=True)
    raise TypeError(
        f"{type(value).__qualname__} has no form in JSON; give what has: dict, list, str, int, float, bool,"
        " None, a dataclass, a msgspec Struct, a pydantic model, datetime, UUID, Decimal, Enum"
    )


_encoder = msgspec.json.Encoder(enc_hook=_other)
_packer = msgspec.msgpack.Encoder(enc_hook=_other)
_special_float = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""NaN or an infinity in MessagePack, or, rarely, bytes that look like it."""


class Json(bytes):
    """Encoded JSON, as a parameter."""

    __slots__ = ()


def json(value: Any) -> Json:
    encoded = _encoder.encode(value)
    if b"null" in encoded:
        _refuse_non_finite(value)
    return Json(encoded)


def refuse_other_than_text(topic: object, key: object, dedup_key: object = None) -> None:
    """InvalidArgument for what is not a string, UnicodeEncodeError for what UTF-8 does not have."""
    if topic is None:
        raise InvalidArgument("an event needs a topic")
    for name, text in (("topic", topic), ("key", key), ("dedup_key", dedup_key)):
        if isinstance(text, str):
            text.encode()
        elif text is not None:
            raise InvalidArgument(f"{name} must be a string, got {text!r}")


def optional_json(value: Any) -> Json | None:
    return None if value is None else json(value)


def _refuse_non_finite(value: Any) -> None:
    """Refuse NaN and infinities, which msgspec writes as null.

    MessagePack has them, so that one more encoding shows whether there are any without a walk in Python.
    """
    try:
        if not _special_float(_packer.encode(value)):
            return
    except (OverflowError, TypeError, ValueError):
        # A large integer, for instance.
        pass
    remaining = [
        msgspec.to_builtins(value, enc_hook=lambda one: None if isinstance(one, msgspec.Raw) else _other(one))
    ]
    while remaining:
        one = remaining.pop()
        if isinstance(one, dict):
            remaining += one.keys()
            remaining += one.values()
        elif isinstance(one, (list, tuple)):
            remaining += one
        elif isinstance(one, float) and not isfinite(one):
            raise InvalidArgument(f"JSON has no number for {one}; expected a finite number or None")


def encode_all(values: Sequence[Any]) -> list[bytes]:
    """Each value as JSON, by one call into msgspec: it writes a line a value and escapes newlines inside.

    Only a `msgspec.Raw` may bring newlines of its own; the count then gives it away.
    """
    written = _encoder.encode_lines(values)
    lines = written[:-1].split(b"\n")
    if len(lines) != len(values):
        lines = [_encoder.encode(value) for value in values]
    if b"null" in written:
        _refuse_non_finite(values)
    return lines


BATCH_BYTES = 32 << 20
"""A lease, a page or a statement ends with the event by which it weighs this much, as in
`pgmb_internal.batch_bytes`. The server weighs stored values: a page that ends there has at least a 91st of
it as text."""


def text_bytes(events: Iterable[Event]) -> int:
    """The bytes of the events' payloads and headers."""
    return sum(len(event.raw) + len(event.raw_headers or b"") for event in events)


def may_go_on(page: Sequence[Event], limit: int) -> bool:
    """Whether more events may follow a page of `between`, of at most `limit` events."""
    return len(page) >= limit or text_bytes(page) >= BATCH_BYTES // 91


class Array:
    """A one-dimensional array, its elements in binary already."""

    __slots__ = ("items",)

    def __init__(self, items: Sequence[bytes | None]) -> None:
        self.items = items


class JsonArray(Array):
    __slots__ = ()


class TextArray(Array):
    __slots__ = ()


class UuidArray(Array):
    __slots__ = ()


class _JsonDumper(Dumper):
    format = pq.Format.BINARY
    oid = _JSON

    def dump(self, obj: Json) -> Buffer:
        return obj


class _ArrayDumper(Dumper):
    format = pq.Format.BINARY
    element: ClassVar[int]

    def dump(self, obj: Array) -> Buffer:
        items = obj.items
        if not items:
            return _array_header(0, 0, self.element, 0, 0)[:12]
        nulls = None in items
        parts = fields(items) if nulls else full_fields(items)
        return _array_header(1, int(nulls), self.element, len(items), 1) + b"".join(parts)


class _JsonArrayDumper(_ArrayDumper):
    oid, element = 199, _JSON


class _TextArrayDumper(_ArrayDumper):
    oid, element = 1009, _TEXT


class _UuidArrayDumper(_ArrayDumper):
    oid, element = 2951, _UUID


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(Json, _JsonDumper)
    adapters.register_dumper(JsonArray, _JsonArrayDumper)
    adapters.register_dumper(TextArray, _TextArrayDumper)
    adapters.register_dumper(UuidArray, _UuidArrayDumper)
    # psycopg has these loaders in C: no Python runs for a cell.
    adapters.register_loader("json", ByteaBinaryLoader)
    adapters.register_loader("uuid", ByteaBinaryLoader)
    adapters.register_loader("timestamptz", Int8BinaryLoader)
    return adapters


ADAPTERS = _adapters()


def full_fields(items: Iterable[Any]) -> Iterator[bytes]:
    """Each element with its length before it; all in C."""
    items = list(items)
    return chain.from_iterable(zip(map(_length, map(len, items)), items, strict=True))


def fields(items: Iterable[bytes | None]) -> Iterator[bytes]:
    """Each element with its length before it, nulls among them."""
    for item in items:
        if item is None:
            yield _NULL
        else:
            yield _length(len(item))
            yield item


def events(rows: Iterable[Row], source: Source) -> list[Event]:
    """Rows of (seq, id, topic, key, payload, headers, published_at, attempt, anything)."""
    # Unpacked by name, which is half as fast again as Event(*row[:-1], stream).
    return [
        Event(seq, given, topic, key, raw, headers, at, attempt, source)
        for seq, given, topic, key, raw, headers, at, attempt, _ in rows
    ]


def dead_letters(rows: Iterable[Row], source: Source) -> list[DeadLetter]:
    """Rows of (seq, event_id, topic, key, payload, headers, published_at, attempt, id, died_at, error,
    errors).
    """
    return [
        DeadLetter(
            number,
            moment(died_at),
            error,
            Event(seq, given, topic, key, raw, headers, at, attempt, source),
            [] if errors is None else _errors(errors),
        )
        for seq, given, topic, key, raw, headers, at, attempt, number, died_at, error, errors in rows
    ]


_errors = msgspec.json.Decoder(list[FailedAttempt]).decode
event_fate = msgspec.json.Decoder(EventFate).decode
next_events = msgspec.json.Decoder(NextEvents).decode


def uuid(value: bytes) -> UUID:
    return UUID(bytes=value)
