"""What is answered: events and what stands where, as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from pgmb.types import Event


class EventDocument(msgspec.Struct):
    """An event. Payload and headers are as they were published, to the letter."""

    seq: int
    id: UUID
    topic: str
    key: str | None
    payload: msgspec.Raw
    headers: msgspec.Raw
    published_at: datetime
    attempt: int
    stream: str

    @classmethod
    def of(cls, event: Event) -> EventDocument:
        return cls(
            event.seq,
            event.id,
            event.topic,
            event.key,
            msgspec.Raw(event.raw),
            msgspec.Raw(event.raw_headers or b"{}"),
            event.published_at,
            event.attempt,
            event.stream,
        )


class Counted(msgspec.Struct):
    """How many there were."""

    count: int


class Changed(msgspec.Struct):
    """Whether anything changed."""

    changed: bool


class Created(msgspec.Struct):
    """Whether it was made; false where it was there already, just so."""

    created: bool


class Dropped(msgspec.Struct):
    """Whether there was one."""

    dropped: bool


Settings = dict[str, Any]
