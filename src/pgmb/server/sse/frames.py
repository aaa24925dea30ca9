"""Server-sent events as bytes, and the resume token that is their id. No I/O."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple, Self

import msgspec

from pgmb.types import Event, Position

_LINE_ENDS: Final = re.compile(rb"\r\n|\r|\n")
_FORBIDDEN_IN_FIELDS: Final = re.compile(rb"[\r\n\x00]")
_CONNECTION_EVENTS: Final = frozenset({"error", "open", "reset"})
"""Event names that browsers and this server use for the connection."""
_encode = msgspec.json.Encoder().encode


def event_frame(data: bytes, *, id: str | None = None, event: str | None = None) -> bytes:
    """Encode an event. Line ends in data start a new data line; in id and event they become spaces.

    So a topic or payload cannot inject fields.
    """
    lines: list[bytes] = []
    if id is not None:
        lines.append(b"id: " + _field_value(id))
    if event is not None:
        lines.append(b"event: " + _field_value(event))
    if b"\n" in data or b"\r" in data:
        lines.extend(b"data: " + line for line in _LINE_ENDS.split(data))
    else:
        lines.append(b"data: " + data)
    lines.append(b"\n")
    return b"\n".join(lines)


def event_json(event: Event) -> bytes:
    """An event as JSON. Payload and headers are copied unparsed."""
    given: dict[str, Any] = {
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "payload": msgspec.Raw(event.raw),
        "headers": msgspec.Raw(event.raw_headers or b"{}"),
        "published_at": event.published_at,
    }
    return _encode(given)


def event_name(topic: str) -> str | None:
    """The SSE event name of a topic; None (`message`) for names of connection events.

    So no publisher can imitate a connection event.
    """
    return None if topic in _CONNECTION_EVENTS else topic


def position_frame(id: str) -> bytes:
    """Keep a quiet connection alive, and set the id that the client reconnects with."""
    return b": \nid: " + _field_value(id) + b"\n\n"


def reset_frame(id: str, reason: str) -> bytes:
    """Tell the client that events are missing before this id, so that it reloads its state."""
    return event_frame(_encode({"reason": reason}), id=id, event="reset")


def retry_frame(milliseconds: int) -> bytes:
    """Set the client's reconnection delay."""
    return b"retry: %d\n\n" % milliseconds


def _field_value(text: str) -> bytes:
    return _FORBIDDEN_IN_FIELDS.sub(b" ", text.encode("utf-8", "replace"))


_TOKEN: Final = re.compile(
    r"([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{1,8})", re.ASCII
)
_MOST_BIGINT: Final = (1 << 63) - 1
_CHECK_MASK: Final = (1 << 32) - 1


class ResumeToken(NamedTuple):
    """The id of a server-sent event: how far a reader has come, for any process of any node to resume from.

    The reader has all events before tick `from_tick`, and those between it and `to_tick` that are numbered up
    to `seq`. `check` is derived from both ticks (`ticks_check`). It detects a stream that was dropped and
    created again, and a history that a failover lost: they may have ticks with the same numbers.
    """

    epoch: int
    from_tick: int
    to_tick: int
    seq: int
    check: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an id; None if it is not a token."""
        found = _TOKEN.fullmatch(text)
        if found is None:
            return None
        numbers = [int(part, 16) for part in found.groups()]
        return None if max(numbers) > _MOST_BIGINT else cls(*numbers)

    def __str__(self) -> str:
        return f"{self.epoch:x}-{self.from_tick:x}-{self.to_tick:x}-{self.seq:x}-{self.check:x}"


def ticks_check(from_tick: Position, to_tick: Position) -> int:
    """A 32-bit checksum of two ticks."""
    # The earliest position has proof 0, so the stream's id is mixed in.
    first, second = (tick.stream ^ tick.proof for tick in (from_tick, to_tick))
    return (first ^ (second << 1)) & _CHECK_MASK
