"""What a reader asks for: topics, fields that equal values, a filter. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple, Self, TypeAlias, cast

import msgspec

from pgmb._core.patterns import compiled
from pgmb.errors import InvalidArgument
from pgmb.types import Event

Path: TypeAlias = tuple[str, ...]
Values: TypeAlias = tuple[Any, ...]
Question: TypeAlias = tuple[str, str | None]
"""A filter and its parameters, as JSON."""

MISSING: Final = object()

_LARGEST: Final = 1 << 20
"""As in the database: a filter does not look into what is larger."""
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""What jsonb cannot hold, and so matches nothing there."""
_MOST_PATTERNS: Final = 100
_MOST_BYTES: Final = 8000
_decode = msgspec.json.Decoder(float_hook=Decimal).decode


class Interest(NamedTuple):
    """Equal ones are matched once, however many readers have them."""

    patterns: tuple[str, ...] = ("#",)
    fields: tuple[Path, ...] = ()
    values: Values = ()
    filter: str | None = None
    params: str | None = None

    @classmethod
    def of(
        cls,
        patterns: Iterable[str] = (),
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Self:
        """InvalidArgument if it is none. The filter itself is the database's to check."""
        wanted = tuple(sorted(set(patterns))) or ("#",)
        if len(wanted) > _MOST_PATTERNS or any(len(pattern) > 1000 for pattern in wanted):
            raise InvalidArgument(f"a reader may ask for {_MOST_PATTERNS} patterns")
        for pattern in wanted:
            compiled(pattern)
        asked = sorted(_flattened(equals)) if equals is not None else []
        if equals is not None and not asked:
            raise _not_fields()
        return cls(
            wanted,
            tuple(path for path, _ in asked),
            tuple(comparable(value) for _, value in asked),
            filter,
            _text(params) if filter is not None and params is not None else None,
        )

    @property
    def question(self) -> Question | None:
        """What the database has to be asked; None where looking at the event suffices."""
        return None if self.filter is None else (self.filter, self.params)

    def matches(self, event: Event, document: Document) -> bool:
        """Whether an event is asked for, but for the filter."""
        if not any(compiled(pattern).fullmatch(event.topic) for pattern in self.patterns):
            return False
        return not self.fields or values_of(event, document, self.fields) == self.values


class Document:
    """An event's payload and headers, read once, if somebody asks for a field of them."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._parts: dict[str, Any] = {}

    def part(self, name: str) -> Any:
        if name not in self._parts:
            self._parts[name] = self._read(name)
        return self._parts[name]

    def _read(self, name: str) -> Any:
        event = self._event
        raw = event.raw if name == "payload" else event.raw_headers or b"{}"
        if len(event.raw) + len(event.raw_headers or b"") > _LARGEST or _NUL.search(raw):
            return MISSING
        try:
            return _decode(raw)
        except (msgspec.DecodeError, RecursionError, ArithmeticError, UnicodeError):
            return MISSING


def values_of(event: Event, document: Document, fields: Iterable[Path]) -> Values:
    """The values of fields, to be compared with an interest's."""
    return tuple(comparable(_field(event, document, path)) for path in fields)


def comparable(value: Any) -> Any:
    """Equal where the database says so: true is not 1, and 1 is 1.0."""
    if value is True or value is False:
        return ("boolean", value)
    if value is None or value is MISSING or isinstance(value, str | int | Decimal):
        return value
    if isinstance(value, float):
        return Decimal(repr(value))
    # An object or a list equals no single value.
    return MISSING


def _field(event: Event, document: Document, path: Path) -> Any:
    if path == ("topic",):
        return event.topic
    if path == ("key",):
        return event.key
    found = document.part(path[0])
    for name in path[1:]:
        if not isinstance(found, dict):
            return MISSING
        found = cast("dict[str, Any]", found).get(name, MISSING)
    return found


def _flattened(equals: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    fields: list[tuple[Path, Any]] = []

    def descend(path: Path, value: Any) -> None:
        if isinstance(value, dict) and value and path[0] in ("payload", "headers"):
            for name, inner in cast("Mapping[str, Any]", value).items():
                descend((*path, name), inner)
            return
        single = value is None or isinstance(value, str | int | float | bool)
        if path[0] in ("topic", "key"):
            single = isinstance(value, str) or (value is None and path[0] == "key")
        if not single or (len(path) == 1) != (path[0] in ("topic", "key")):
            raise _not_fields()
        fields.append((path, cast("Any", value)))

    for name, value in equals.items():
        if name not in ("topic", "key", "payload", "headers"):
            raise _not_fields()
        descend((name,), value)
    return fields


def _text(given: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(given, order="deterministic").decode()
    if len(text) > _MOST_BYTES:
        raise InvalidArgument(f"params have at most {_MOST_BYTES} bytes")
    return text


def _not_fields() -> InvalidArgument:
    refused = InvalidArgument("not fields to be equal")
    refused.advise(
        "An object of topic and key, which are texts, payload and headers with single values:"
        ' {"payload": {"status": "paid"}}.'
    )
    return refused
