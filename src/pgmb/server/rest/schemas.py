"""Types of requests and responses, with their limits. The OpenAPI document is generated from them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Final, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Meta

from pgmb.types import Event

MOST_IDS: Final = 100_000

Name: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$", description="A name."),
]
StreamName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_.-]*$", description="A stream's name.")
]
Text: TypeAlias = Annotated[str, Meta(max_length=10_000, pattern=r"^[^\x00]*$")]
# Short enough for the indexes that hold them.
Topic: TypeAlias = Annotated[str, Meta(min_length=1, max_length=500, pattern=r"^[^\x00]*$")]
Key: TypeAlias = Annotated[str, Meta(max_length=500, pattern=r"^[^\x00]*$")]
Patterns: TypeAlias = Annotated[list[Topic], Meta(min_length=1, max_length=1000)]
_POSITION: Final = r'\([0-9]+,[0-9]+,[0-9]+,[0-9]+,"?[0-9]+:[0-9]+:[0-9,]*"?,[0-9]+,[0-9]+\)'
PositionText: TypeAlias = Annotated[
    str, Meta(pattern=f"^{_POSITION}$", description="A position, as returned by another request.")
]
Point: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^(earliest|latest|[0-9]{{4}}-[^\x00]{{6,50}}|{_POSITION})$",
        description="`earliest`, `latest`, a time with a time zone, or a position.",
    ),
]
Duration: TypeAlias = timedelta | Annotated[float, Meta(ge=0)]
"""Seconds, or an ISO 8601 duration in days, hours, minutes and seconds."""
Time: TypeAlias = Annotated[datetime, Meta(tz=True)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NumberText: TypeAlias = Annotated[str, Meta(pattern="^[0-9]{1,19}$")]
"""A number as text, for clients whose numbers are exact up to 2^53 only."""
Integer: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Numbers: TypeAlias = Annotated[list[Number], Meta(max_length=MOST_IDS)]
Ids: TypeAlias = Annotated[list[UUID], Meta(min_length=1, max_length=MOST_IDS)]
Page: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
Object: TypeAlias = dict[str, Any]


class Given(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A query or a body."""


class Nothing(Given):
    """An empty object, or no body."""


class NewEvent(Given):
    """An event to publish."""

    topic: Topic
    payload: msgspec.Raw
    """Any JSON, stored unchanged."""
    key: Key | None = None
    headers: Object | None = None
    id: UUID | None = None
    dedup_key: Annotated[str, Meta(min_length=1, max_length=500, pattern=r"^[^\x00]*$")] | None = None
    """The event is not published if the stream had one with this key within a day."""
    delay: Duration | None = None
    """The event enters the log after this time."""


class EventDocument(msgspec.Struct):
    """An event. Payload and headers are returned unchanged."""

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
    """The number of events."""

    count: int


class Changed(msgspec.Struct):
    """Whether anything changed."""

    changed: bool


class Created(msgspec.Struct):
    """Whether it was created; false if it existed with the same settings."""

    created: bool


class Dropped(msgspec.Struct):
    """Whether it existed."""

    dropped: bool


Settings = dict[str, Any]
