"""The events of a background publisher: which to publish next, together, again, or never. No I/O, no lock.

Events of one stream leave in the order in which they came. A batch is one transaction; what happens to it:

committed   its events are forgotten
rejected    by the server, for what is in it: halved, until the events at fault stand alone and go aside
failed      for a reason that passes (connection, server, a full queue): kept in place, tried again later;
            halved if it fails again in the middle of its statement, which may be what ends the connection
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import psycopg_pool

from pgmb._core import chance, durations, wire
from pgmb._core.batch import BLOCK_EVENTS
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS
from pgmb.errors import InvalidArgument, PermissionDenied, QueueFull, StreamNotFound, WrongServer
from pgmb.types import Duration, NewEvent

FIRST_PAUSE_SECONDS = 0.1
"""Seconds between attempts after a failure that passes: doubled each time."""

MARKED_FOR = timedelta(hours=1)
"""How long the database remembers a batch's marker: longer than an outage that a publisher lives through."""

# The server's state or the connection's, not the event's: SQLSTATE classes of connection, transaction state,
# rollback, resources, object in use, intervention and system errors.
_PASSING = ("08", "25", "40", "53", "55", "57", "58")
_CONNECTION = ("08", "57")
_CANCELED = "57014"
_OUT_OF_MEMORY = "53200"


class Unpublished(msgspec.Struct, frozen=True):
    """An event that a publisher holds, and what kept it."""

    number: int
    stream: str
    event: NewEvent
    error: Exception | None = None
    size: int = 0
    """Bytes of payload and headers."""


class Batch(msgspec.Struct):
    """Events that go together."""

    stream: str
    items: list[Unpublished]
    uncertain: bool = False
    """Whether an earlier attempt may have committed unnoticed."""
    sent: bool = False
    """Whether the newest attempt came to where it may commit."""
    broken: int = 0
    """Attempts that failed in the middle of the batch's own statement."""


class _Backlog:
    """One stream's events."""

    def __init__(self) -> None:
        self.first: deque[Batch] = deque()
        """To be published again, before the rest."""
        self.rest: deque[Unpublished] = deque()
        self.since = 0.0
        self.failures = 0
        self.not_before = 0.0
        self.error: Exception | None = None
        self.busy = False

    def head(self) -> int | None:
        if self.first:
            return self.first[0].items[0].number
        return self.rest[0].number if self.rest else None

    def items(self) -> Iterator[Unpublished]:
        for batch in self.first:
            yield from batch.items
        yield from self.rest


class Pending:
    """The events of one publisher, from `add` until they are committed or taken out."""

    def __init__(
        self, flush_every: Duration, max_batch: int, max_pending: int, max_pending_bytes: int = 256 << 20
    ) -> None:
        seconds = durations.seconds(flush_every)
        if seconds < 0 or max_batch < 1 or max_pending < 1 or max_pending_bytes < 1:
            raise InvalidArgument(
                "flush_every must not be negative, max_batch, max_pending and max_pending_bytes must be at"
                " least 1"
            )
        self._flush_every = seconds
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._bytes = 0
        self._backlogs: dict[str, _Backlog] = {}
        self._number = 0
        self._flush_to = 0
        self._given_up = False
        self.count = 0
        """All events held: waiting, in a batch, and rejected."""
        self.failed: list[Unpublished] = []
        """Rejected by the server."""

    @property
    def full(self) -> bool:
        return self.count >= self._max_pending or self._bytes >= self._max_pending_bytes

    @property
    def stuck(self) -> bool:
        """Whether it is full of events that only `discard_failed` removes."""
        return self.full and self.count == len(self.failed)

    def add(self, event: NewEvent, stream: str, now: float) -> bool:
        """Take an event. True if a batch may be ready now."""
        backlog = self._backlogs.get(stream)
        if backlog is None:
            backlog = self._backlogs[stream] = _Backlog()
        if not backlog.rest:
            backlog.since = now
        self._number += 1
        size = _bytes(event)
        self.count += 1
        self._bytes += size
        backlog.rest.append(Unpublished(self._number, stream, event, None, size))
        return len(backlog.rest) == 1 or len(backlog.rest) == self._max_batch

    def flush(self) -> int:
        """Publish everything at once, rejected events once more. Returns the number of the last event."""
        self._flush_to = self._number
        for backlog in self._backlogs.values():
            backlog.not_before = 0.0
        again: dict[str, list[Unpublished]] = {}
        for item in self.failed:
            again.setdefault(item.stream, []).append(item)
        for stream, items in again.items():
            left = deque(items)
            while left:
                self._backlogs[stream].first.append(Batch(stream, _portion(left, self._max_batch)))
        self.failed = []
        return self._flush_to

    def widen(self) -> None:
        """Make batches as large as a statement should be."""
        self._max_batch = max(self._max_batch, BLOCK_EVENTS)

    def passed(self, last: int) -> bool:
        """Whether every event up to `last` is committed or rejected."""
        return all(item.number > last for backlog in self._backlogs.values() for item in _heads(backlog))

    def left(self, last: int) -> list[Unpublished]:
        """The events up to `last` that are not committed, in order."""
        waiting = (
            msgspec.structs.replace(item, error=backlog.error)
            for backlog in self._backlogs.values()
            for item in backlog.items()
        )
        return sorted(
            (item for item in (*self.failed, *waiting) if item.number <= last), key=lambda item: item.number
        )

    def next(self, now: float) -> Batch | float | None:
        """A batch to publish; or in how many seconds to look again; None when there is nothing."""
        wait: float | None = None
        ready: _Backlog | None = None
        for backlog in self._backlogs.values():
            head = backlog.head()
            if head is None or backlog.busy:
                continue
            due = max(backlog.not_before, self._due(backlog, head))
            if due > now:
                wait = due - now if wait is None else min(wait, due - now)
            elif ready is None or head < (ready.head() or 0):
                ready = backlog
        return wait if ready is None else self._take(ready, now)

    def _due(self, backlog: _Backlog, head: int) -> float:
        if backlog.first or head <= self._flush_to or len(backlog.rest) >= self._max_batch:
            return 0.0
        return backlog.since + self._flush_every

    def _take(self, backlog: _Backlog, now: float) -> Batch:
        if not backlog.first:
            items = _portion(backlog.rest, self._max_batch)
            backlog.since = now
            backlog.first.append(Batch(items[0].stream, items))
        backlog.busy = True
        backlog.first[0].sent = False
        # It stays where it is until it is known what became of it.
        return backlog.first[0]

    def committed(self, batch: Batch) -> None:
        """The batch is in the log."""
        if self._gone(batch):
            return
        backlog = self._backlogs[batch.stream]
        backlog.busy = False
        backlog.failures, backlog.not_before, backlog.error = 0, 0.0, None
        backlog.first.popleft()
        self._forget(batch.items)

    def refused(self, batch: Batch, error: Exception, now: float) -> list[Unpublished]:
        """The batch is not in the log. Returns what was set aside for it."""
        if self._gone(batch):
            return []
        backlog = self._backlogs[batch.stream]
        backlog.busy = False
        # Of a batch that may be in the log, an error about the stream as it is now says nothing.
        if passes(error) or (batch.uncertain and concerns_all(error)):
            batch.uncertain = batch.uncertain or (batch.sent and may_have_committed(error))
            batch.broken += breaks(error)
            # A statement_timeout, or memory that does not suffice, says that fewer take less. What ends
            # connections without a word must do so twice.
            enough = 1 if isinstance(error, psycopg.Error) and error.sqlstate else 2
            if batch.broken >= enough and not batch.uncertain:
                backlog.first.popleft()
                backlog.first.extendleft(reversed(_halves(batch)))
            backlog.error = error
            backlog.failures += 1
            pause = min(LONGEST_RETRY_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(backlog.failures - 1, 10))
            # Not all publishers at once.
            backlog.not_before = now + pause * chance.between(0.5, 1.0)
            return []
        backlog.first.popleft()
        if len(batch.items) > 1 and not concerns_all(error):
            backlog.first.extendleft(reversed(_halves(batch)))
            return []
        aside = [msgspec.structs.replace(item, error=error) for item in batch.items]
        self.failed += aside
        return aside

    def released(self, batch: Batch) -> None:
        """The publishing task ended without knowing whether the batch was committed."""
        batch.uncertain = True
        if not self._gone(batch):
            self._backlogs[batch.stream].busy = False

    def _gone(self, batch: Batch) -> bool:
        """Whether its events were given up meanwhile."""
        backlog = self._backlogs.get(batch.stream)
        return backlog is None or not backlog.first or backlog.first[0] is not batch

    def give_up(self) -> list[Unpublished]:
        """The events that nobody will publish, in order. Forgets all but those that the server rejected."""
        gone = [] if self._given_up else self.left(self._number)
        self._given_up = True
        self._backlogs, self.count, self._bytes = {}, 0, 0
        self.count = len(self.failed)
        return gone

    def discard_failed(self) -> list[Unpublished]:
        """Forget what was set aside, and return it."""
        gone, self.failed = self.failed, []
        self._forget(gone)
        return gone

    def _forget(self, items: Sequence[Unpublished]) -> None:
        self.count -= len(items)
        self._bytes -= sum(item.size for item in items)


def line(item: Unpublished) -> str:
    """An event as JSON with all that it has."""
    event = item.event
    fields = {
        "topic": event.topic,
        "payload": event.payload,
        "key": event.key,
        "headers": event.headers,
        "id": event.id,
        "dedup_key": event.dedup_key,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode(given).decode("utf-8", "backslashreplace")


def made(
    topic: str, payload: Any, key: str | None, headers: Any, given: UUID, dedup_key: str | None
) -> NewEvent:
    """The event as it will be sent: what cannot be sent raises here, what changes later does not matter."""
    wire.refuse_other_than_text(topic, key, dedup_key)
    return NewEvent(
        topic,
        msgspec.Raw(wire.json(payload)),
        key,
        None if headers is None else msgspec.Raw(wire.json(headers)),
        given,
        dedup_key,
    )


def fresh_id() -> UUID:
    """A version 7 UUID: the time in milliseconds, then random bits."""
    bits = chance.bits(74)
    high = time.time_ns() // 1_000_000 << 16 | 7 << 12 | bits >> 62
    return UUID(int=high << 64 | 2 << 62 | bits & (1 << 62) - 1)


def marker_key(first: NewEvent) -> str:
    """The deduplication key that stands for a batch, by its first event.

    The batch commits with it or not at all, so if the key is taken, the batch is in the log.
    """
    return f"publisher:{first.id}"


def marked(first: NewEvent) -> NewEvent:
    """The first event of a batch with the batch's marker, where no event has a key of its own."""
    return msgspec.structs.replace(first, dedup_key=marker_key(first))


def _portion(items: deque[Unpublished], most: int) -> list[Unpublished]:
    """Take the next batch: at most so many events, and no more bytes than a statement should have."""
    portion: list[Unpublished] = []
    size = 0
    while items and len(portion) < most:
        size += items[0].size
        if portion and size > wire.BATCH_BYTES:
            break
        portion.append(items.popleft())
    return portion


def _bytes(event: NewEvent) -> int:
    """Of payload and headers, as `made` has encoded them."""
    parts = (event.payload, event.headers)
    return sum(memoryview(part).nbytes for part in parts if isinstance(part, msgspec.Raw))


def _halves(batch: Batch) -> list[Batch]:
    half = len(batch.items) // 2
    return [Batch(batch.stream, items) for items in (batch.items[:half], batch.items[half:]) if items]


def _heads(backlog: _Backlog) -> Sequence[Unpublished]:
    # What goes again may be older or younger than the rest: events set aside come back at the front.
    first = [min(batch.items, key=lambda item: item.number) for batch in backlog.first]
    return [*first, backlog.rest[0]] if backlog.rest else first


# -- what an error says about the events that were refused: wait, ask, or give up


def passes(error: Exception) -> bool:
    """Whether the same events may well be accepted later, with nothing changed about them."""
    if isinstance(error, QueueFull | WrongServer | psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
        return True
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    if error.sqlstate is None:
        # Said by the driver. Of the connection, or of a value that cannot be sent.
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_PASSING)


def may_have_committed(error: Exception) -> bool:
    """Whether the connection was lost at a moment when the commit may have happened."""
    if isinstance(error, psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
        return False
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    state = error.sqlstate
    return state is None or (state.startswith(_CONNECTION) and state != _CANCELED)


def concerns_all(error: Exception) -> bool:
    """Whether it is about the stream, not about one event or another."""
    return isinstance(error, StreamNotFound | PermissionDenied)


def breaks(error: Exception) -> bool:
    """Whether the statement was under way, and may have failed for its size."""
    if not isinstance(error, psycopg.Error) or isinstance(
        error, psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests
    ):
        return False
    state = error.sqlstate
    return state is None or state in (_CANCELED, _OUT_OF_MEMORY) or state.startswith("54")
