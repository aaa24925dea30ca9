"""Matches events to readers by topic pattern and field values. No I/O."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, Generic, NamedTuple, Self, TypeAlias, TypeVar, cast

import msgspec

from pgmb._core.patterns import compiled
from pgmb.errors import InvalidArgument
from pgmb.server.sse.frames import ResumeToken, event_frame, event_json, event_name
from pgmb.types import Event

PIECE_BYTES: Final = 64 << 10
"""Sent at a time. The server's buffer holds two pieces of a client that does not read. What else waits for it
are frames that readers share."""

Path: TypeAlias = tuple[str, ...]
Values: TypeAlias = tuple[Any, ...]

MISSING: Final = object()

_LARGEST_EVENT_BYTES: Final = 1 << 20
"""Fields of larger events match nothing, as in the database."""
_NUL_ESCAPE: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""jsonb cannot hold NUL, so such events match nothing in the database either."""
_MOST_PATTERNS: Final = 100
_MOST_PARAMS_BYTES: Final = 8000
_decode = msgspec.json.Decoder(float_hook=Decimal).decode


class Sieve(NamedTuple):
    """What the database evaluates: a filter, an SQL condition, or both, and their parameters as JSON."""

    filter: str | None = None
    params: str | None = None
    condition: str | None = None

    @classmethod
    def of(
        cls, filter: str | None, params: Mapping[str, Any] | None = None, condition: str | None = None
    ) -> Self | None:
        """None if there is nothing to evaluate. The database validates it."""
        if filter is None and condition is None:
            return None
        return cls(filter, None if params is None else _params_text(params), condition)


class Interest(NamedTuple):
    """What a reader asks for beside its sieve. Readers with equal interests are matched together."""

    patterns: tuple[str, ...] = ("#",)
    fields: tuple[Path, ...] = ()
    values: Values = ()

    @classmethod
    def of(cls, patterns: Iterable[str] = (), equals: Mapping[str, Any] | None = None) -> Self:
        """Validate an interest. Raises InvalidArgument."""
        wanted = tuple(sorted(set(patterns))) or ("#",)
        if len(wanted) > _MOST_PATTERNS or any(len(pattern) > 1000 for pattern in wanted):
            raise InvalidArgument(f"a reader may have at most {_MOST_PATTERNS} patterns")
        for pattern in wanted:
            compiled(pattern)
        asked = sorted(_flattened(equals)) if equals is not None else []
        if equals is not None and not asked:
            raise _invalid_equals()
        return cls(
            wanted,
            tuple(path for path, _ in asked),
            tuple(comparable(value) for _, value in asked),
        )

    def matches(self, event: Event, document: EventFields) -> bool:
        """Whether an event matches."""
        if not any(compiled(pattern).fullmatch(event.topic) for pattern in self.patterns):
            return False
        return not self.fields or values_of(event, document, self.fields) == self.values


class EventFields:
    """An event's payload and headers, decoded once, on first use."""

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
        if len(event.raw) + len(event.raw_headers or b"") > _LARGEST_EVENT_BYTES or _NUL_ESCAPE.search(raw):
            return MISSING
        try:
            return _decode(raw)
        except (msgspec.DecodeError, RecursionError, ArithmeticError, UnicodeError):
            return MISSING


class Entry:
    """An event with its resume token. It is encoded once for all readers."""

    __slots__ = ("_frames", "document", "event", "number", "token")

    def __init__(self, event: Event, token: ResumeToken) -> None:
        self.event = event
        self.token = token
        self.number = 0
        """Its place among the events that this process read (`history.Recent`)."""
        self.document = EventFields(event)
        self._frames: list[bytes | None] = [None, None]

    def frame(self, named: bool) -> bytes:
        """The encoded frame; with `named`, the SSE event is named after the topic."""
        frame = self._frames[named]
        if frame is None:
            name = event_name(self.event.topic) if named else None
            frame = event_frame(event_json(self.event), id=str(self.token), event=name)
            self._frames[named] = frame
        return frame


def parts(entries: Sequence[Entry], most: int) -> Iterator[Sequence[Entry]]:
    """Cut entries into parts of at most so many events, and of about a piece unless one event is larger."""
    first = size = 0
    for place, entry in enumerate(entries):
        size += len(entry.event.raw)
        if place > first and (place - first >= most or size > PIECE_BYTES):
            yield entries[first:place]
            first, size = place, len(entry.event.raw)
    if entries:
        yield entries[first:]


def values_of(event: Event, document: EventFields, fields: Iterable[Path]) -> Values:
    """The values of an event's fields, comparable with an interest's."""
    return tuple(comparable(_field(event, document, path)) for path in fields)


def comparable(value: Any) -> Any:
    """A value that compares as in the database: true differs from 1, and 1 equals 1.0."""
    if value is True or value is False:
        return ("boolean", value)
    if value is None or value is MISSING or isinstance(value, str | int | Decimal):
        return value
    if isinstance(value, float):
        return Decimal(repr(value))
    # Objects and lists equal nothing.
    return MISSING


def _field(event: Event, document: EventFields, path: Path) -> Any:
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
            raise _invalid_equals()
        fields.append((path, cast("Any", value)))

    for name, value in equals.items():
        if name not in ("topic", "key", "payload", "headers"):
            raise _invalid_equals()
        descend((name,), value)
    return fields


def _params_text(given: Mapping[str, Any]) -> str:
    text = msgspec.json.encode(given, order="deterministic").decode()
    if len(text) > _MOST_PARAMS_BYTES:
        raise InvalidArgument(f"params have at most {_MOST_PARAMS_BYTES} bytes")
    return text


def _invalid_equals() -> InvalidArgument:
    refused = InvalidArgument("invalid equals")
    refused.advise(
        "An object of topic and key, which are texts, payload and headers with single values:"
        ' {"payload": {"status": "paid"}}.'
    )
    return refused


Reader = TypeVar("Reader", bound=Hashable)

_Shape: TypeAlias = tuple[tuple[str, ...], tuple[Path, ...]]
"""Patterns, and the fields that are compared."""


class ReaderIndex(Generic[Reader]):
    """Finds the readers of an event. Readers are indexed by patterns, compared fields and values."""

    def __init__(self) -> None:
        self._topics: TopicTrie[_Shape] = TopicTrie()
        self._shapes: dict[_Shape, dict[Values, set[Reader]]] = {}

    def add(self, reader: Reader, interest: Interest) -> None:
        shape = interest.patterns, interest.fields
        if shape not in self._shapes:
            self._shapes[shape] = {}
            for pattern in interest.patterns:
                self._topics.add(pattern, shape)
        self._shapes[shape].setdefault(interest.values, set()).add(reader)

    def remove(self, reader: Reader, interest: Interest) -> None:
        """Remove a reader, and the index entries that become empty."""
        shape = interest.patterns, interest.fields
        by_values = self._shapes.get(shape, {})
        readers = by_values.get(interest.values, set())
        readers.discard(reader)
        if not readers:
            by_values.pop(interest.values, None)
        if not by_values and self._shapes.pop(shape, None) is not None:
            for pattern in interest.patterns:
                self._topics.remove(pattern, shape)

    def matching(self, event: Event, document: EventFields) -> Iterator[set[Reader]]:
        """Sets of readers that an event matches."""
        for shape in self._topics.matching(event.topic):
            readers = self._shapes[shape].get(values_of(event, document, shape[1]))
            if readers is not None:
                yield readers


Item = TypeVar("Item", bound=Hashable)


class _Node(Generic[Item]):
    __slots__ = ("below", "is_hash", "items")

    def __init__(self, is_hash: bool = False) -> None:
        self.is_hash = is_hash
        self.below: dict[str, _Node[Item]] = {}
        self.items: set[Item] = set()


class TopicTrie(Generic[Item]):
    """Items by topic pattern, as a trie of words. `matching` agrees with `pgmb.patterns.matches`."""

    def __init__(self) -> None:
        self._root: _Node[Item] = _Node()

    def add(self, pattern: str, item: Item) -> None:
        node = self._root
        for word in pattern.split("."):
            if word not in node.below:
                node.below[word] = _Node(word == "#")
            node = node.below[word]
        node.items.add(item)

    def remove(self, pattern: str, item: Item) -> None:
        """Remove an item, and the branches that become empty."""
        way = [self._root]
        words = pattern.split(".")
        for word in words:
            found = way[-1].below.get(word)
            if found is None:
                return
            way.append(found)
        way[-1].items.discard(item)
        while words and not way[-1].items and not way[-1].below:
            way.pop()
            del way[-1].below[words.pop()]

    def matching(self, topic: str) -> set[Item]:
        """The items of all patterns that a topic matches."""
        nodes = _with_empty_hashes({self._root})
        for word in topic.split("."):
            reached: set[_Node[Item]] = set()
            for node in nodes:
                if node.is_hash:
                    # A # matches this word too, and stays.
                    reached.add(node)
                if "*" in node.below:
                    reached.add(node.below["*"])
                # A * or # in a topic is an ordinary word, which no pattern can name.
                if word not in ("*", "#") and word in node.below:
                    reached.add(node.below[word])
            nodes = _with_empty_hashes(reached)
        return {item for node in nodes for item in node.items}


def _with_empty_hashes(nodes: set[_Node[Item]]) -> set[_Node[Item]]:
    """Add the nodes that are reached by a # that matches no word."""
    reached = set(nodes)
    fresh = list(nodes)
    while fresh:
        below = fresh.pop().below.get("#")
        if below is not None and below not in reached:
            reached.add(below)
            fresh.append(below)
    return reached
