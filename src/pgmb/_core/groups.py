"""Statements of groups and subscriptions, and the events that they return."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast
from uuid import UUID, uuid4

import msgspec

from pgmb._core import wire
from pgmb._core.statements import Statement, interval
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, Event, Position, Source

_SUBSCRIBE: Final = (
    "select pgmb.subscribe(group_id => %s::text, patterns => %s::text[], equals => %s::jsonb,"
    " filter => %s::text, condition => %s::text, params => %s::jsonb, expires_after => %s::interval,"
    " stream => %s::text)"
)
_SUBSCRIPTIONS: Final = (
    "select id, group_id, stream, patterns, equals, filter, conditions_sql, params, expiry_interval,"
    " last_active_at, created_at, paused_at, paused_reason from pgmb.subscriptions"
    " where group_id = %s::text and stream = %s::text order by created_at, id"
)
_PAUSED: Final = (
    "select id, paused_reason from pgmb.subscriptions where id = any (%s::uuid[]) and paused_at is not null"
)
_RECEIVE_GROUP: Final = (
    "select seq, id, topic, key, payload, headers, published_at, attempt, subscriptions, lease"
    " from pgmb.receive_group(group_id => %s::text, max => %s::integer, lease_for => %s::interval,"
    " ack => %s::uuid, durable => %s::boolean)"
)
_BETWEEN_GROUP: Final = (
    "select seq, id, topic, key, payload, headers, published_at, 1, subscriptions"
    " from pgmb.between_group(group_id => %s::text, stream => %s::text, after => %s::pgmb.position,"
    " upto => %s::pgmb.position, after_seq => %s::bigint, max => %s::bigint)"
)
_LONGEST_NAME_CHARACTERS: Final = 100


class SubscriptionSpec(NamedTuple):
    """The events that a subscription matches. Equal specs are one subscription."""

    patterns: tuple[str, ...]
    equals: wire.Json | None
    filter: str | None
    condition: str | None
    params: wire.Json | None

    @classmethod
    def of(
        cls,
        patterns: Iterable[str] | str | None,
        equals: Mapping[str, Any] | None,
        filter: str | None,
        condition: str | None,
        params: Mapping[str, Any] | None,
    ) -> SubscriptionSpec:
        if patterns is None:
            patterns = ("#",)
        elif isinstance(patterns, str):
            raise InvalidArgument(f"patterns must be a list of strings, got {patterns!r}")
        return cls(tuple(patterns), wire.optional_json(equals), filter, condition, wire.optional_json(params))

    def subscribe(self, group: str, expires_after: Duration | None, stream: str) -> Statement:
        matched = (list(self.patterns), self.equals, self.filter, self.condition, self.params)
        return Statement(_SUBSCRIBE, (group, *matched, interval(expires_after), stream))


def unsubscribe(id: UUID) -> Statement:
    return Statement("select pgmb.unsubscribe(id => %s::uuid)", (id,))


def keep_subscriptions(ids: Iterable[UUID]) -> Statement:
    return Statement("select pgmb.keep_subscriptions(ids => %s::uuid[])", (_several(ids),))


def paused(ids: Iterable[UUID]) -> Statement:
    return Statement(_PAUSED, (_several(ids),))


def _several(ids: Iterable[UUID]) -> wire.UuidArray:
    return wire.UuidArray([one.bytes for one in ids])


def resume_subscriptions(group: str, id: UUID | None) -> Statement:
    return Statement("select pgmb.resume_subscriptions(group_id => %s::text, id => %s::uuid)", (group, id))


def subscriptions(group: str, stream: str) -> Statement:
    return Statement(_SUBSCRIPTIONS, (group, stream))


def receive_group(
    group: str, limit: int, lease_for: Duration | None, ack: UUID | None, *, alone: bool
) -> Statement:
    durable = not alone or ack is not None
    return Statement(_RECEIVE_GROUP, (group, limit, interval(lease_for), ack, durable))


def between_group(
    group: str, stream: str, after: Position, upto: Position, after_seq: int, limit: int
) -> Statement:
    return Statement(_BETWEEN_GROUP, (group, stream, str(after), str(upto), after_seq, limit))


def events(rows: Iterable[Sequence[Any]], source: Source) -> list[Event]:
    """Rows of (seq, id, topic, key, payload, headers, published_at, attempt, subscriptions, …)."""
    known: dict[bytes, UUID] = {}

    def named(id: bytes) -> UUID:
        found = known.get(id)
        if found is None:
            found = known[id] = UUID(bytes=id)
        return found

    return [
        Event(*row[:8], source, cast("Any", msgspec.UNSET), tuple(map(named, row[8])))  # type: ignore[call-arg]
        for row in rows
    ]


def private_name(group: str) -> str:
    """A group of its own for one process of a group, whose subscriptions no other process shares or ends."""
    own = f"/{uuid4().hex[:16]}"
    return group[: _LONGEST_NAME_CHARACTERS - len(own)] + own


def seconds(duration: Duration) -> float:
    """A time in which something expires."""
    given = interval(duration)
    if given is None or given <= timedelta(0):
        raise InvalidArgument(f"expires_after must be positive, got {duration!r}")
    return given.total_seconds()


class Buffer:
    """A bounded buffer of events. When it is full, the oldest are dropped and counted."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise InvalidArgument(f"max_pending must be at least 1, got {most}")
        self._events: deque[Event] = deque(maxlen=most)
        self.dropped = 0

    def put(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self.dropped += 1
        self._events.append(event)

    def take(self, limit: int) -> list[Event]:
        taken: list[Event] = []
        # By attempts, not by length: another thread may be putting.
        while len(taken) < limit:
            try:
                taken.append(self._events.popleft())
            except IndexError:
                break
        return taken

    def __len__(self) -> int:
        return len(self._events)
