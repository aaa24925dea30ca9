"""Server-sent events as bytes. What a topic or payload holds cannot become a field of its own. No I/O."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pgmb.types import Event

_LINE_ENDS: Final = re.compile(rb"\r\n|\r|\n")
_NOT_IN_A_FIELD: Final = re.compile(rb"[\r\n\x00]")
_OF_THE_CONNECTION: Final = frozenset({"error", "open", "reset"})
"""Names by which a browser, or this server, speaks of the connection."""
_encode = msgspec.json.Encoder().encode


def frame(data: bytes, *, id: str | None = None, event: str | None = None) -> bytes:
    """One event. Line ends of the data stay line ends, in lines of their own; in a name they are spaces."""
    lines: list[bytes] = []
    if id is not None:
        lines.append(b"id: " + _in_a_field(id))
    if event is not None:
        lines.append(b"event: " + _in_a_field(event))
    if b"\n" in data or b"\r" in data:
        lines.extend(b"data: " + line for line in _LINE_ENDS.split(data))
    else:
        lines.append(b"data: " + data)
    lines.append(b"\n")
    return b"\n".join(lines)


def document(event: Event) -> bytes:
    """What a reader gets of an event; the payload and the headers to the letter."""
    given: dict[str, Any] = {
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "payload": msgspec.Raw(event.raw),
        "headers": msgspec.Raw(event.raw_headers or b"{}"),
        "published_at": event.published_at,
    }
    return _encode(given)


def name(topic: str) -> str | None:
    """The name under which events of a topic come; None for those that come as messages, because their topic
    is the name of an event of the connection, which no publisher can imitate.
    """
    return None if topic in _OF_THE_CONNECTION else topic


def place(id: str) -> bytes:
    """Has the reader come back with this id, and tells it nothing: keeps a quiet connection alive."""
    return b": \nid: " + _in_a_field(id) + b"\n\n"


def reset(id: str, reason: str) -> bytes:
    """Says that events are missing before this place: what the reader knows has to be fetched anew."""
    return frame(_encode({"reason": reason}), id=id, event="reset")


def retry(milliseconds: int) -> bytes:
    """How long to wait before coming back."""
    return b"retry: %d\n\n" % milliseconds


def _in_a_field(text: str) -> bytes:
    return _NOT_IN_A_FIELD.sub(b" ", text.encode("utf-8", "replace"))
