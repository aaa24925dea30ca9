"""Statements for the drivers of other libraries: all parameters and the one result column are text.

Drivers differ in the types that they read and write, and users change those. Text means the same to all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

import msgspec

from pgmb._core import wire
from pgmb._core.statements import Statement
from pgmb.errors import InvalidArgument
from pgmb.types import microseconds

_PARAMETER: Final = re.compile(r"%s|%%")
_NAMED: Final = re.compile(r"\bpgmb\.(\w+)")
_READABLE: Final = {
    *("publish", "publish_many", "cancel", "receive", "receive_any", "dead_letters"),
    *("create_stream", "create_queue"),
    *("ack", "retry", "bury", "release", "extend", "bury_unreadable", "redrive", "drop_dead"),
}
"""The calls whose results `row` reads."""
_BESIDE: Final = {"stream", "stream_of"}
_JSON: Final = {"headers", "errors"}
_IDS: Final = {"id", "event_id", "lease", "publish"}
_TIMES: Final = {"published_at", "died_at", "extend"}
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def as_text(statement: Statement, placeholder: str) -> tuple[str, list[str | None]]:
    """A statement that returns one column of JSON texts, and its parameters as texts.

    placeholder: how the driver writes a parameter, "%s" or, with its number, "${}".
    """
    return _text(statement.text, placeholder), [_written(value) for value in statement.parameters]


@lru_cache(512)
def _text(text: str, placeholder: str) -> str:
    if set(_NAMED.findall(text)) - _READABLE - _BESIDE:
        raise refusal()
    number = 0

    def written(found: re.Match[str]) -> str:
        nonlocal number
        if found[0] == "%%":
            return "%%" if placeholder == "%s" else "%"
        number += 1
        # The driver sends text whatever the parameter's type is.
        return f"{placeholder.format(number)}::text"

    return f"with r as ({_PARAMETER.sub(written, text)}) select to_json(r)::text from r"


def refusal() -> InvalidArgument:
    """For the calls that only psycopg's connections serve."""
    refused = InvalidArgument("conn= of this call must be a psycopg connection, or wrap one")
    refused.advise(f"Connections of other drivers serve {', '.join(sorted(_READABLE))}.")
    return refused


def row(told: str) -> wire.Row:
    """A row as the client reads it from psycopg."""
    return tuple(_read(name, value) for name, value in _decode(told).items())


def _read(name: str, value: msgspec.Raw) -> Any:
    raw = bytes(value)
    if name == "payload":
        return raw
    if raw == b"null":
        return None
    if name in _JSON:
        return raw
    read = msgspec.json.decode(raw)
    if name in _IDS and isinstance(read, str):
        return UUID(read).bytes
    if name in _TIMES:
        return microseconds(datetime.fromisoformat(read))
    return read


def _written(value: Any) -> str | None:
    """A parameter as PostgreSQL reads it from text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, wire.Json):
        return value.decode()
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
    if isinstance(value, wire.UuidArray):
        return _array([None if item is None else str(UUID(bytes=item)) for item in value.items])
    if isinstance(value, wire.Array):
        return _array([None if item is None else item.decode() for item in value.items])
    if isinstance(value, Sequence):
        return _array([_written(item) for item in value])
    return str(value)


def _array(items: Sequence[str | None]) -> str:
    return "{" + ",".join("null" if item is None else _quoted(item) for item in items) + "}"


def _quoted(item: str) -> str:
    escaped = item.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
