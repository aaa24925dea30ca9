"""A stream's past: reading ticks and events from the database, and recent events in memory."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

import psycopg

from pgmb._async.broker import AsyncBroker
from pgmb._core.wire import may_go_on
from pgmb.errors import StandbyError, TimeoutRequired
from pgmb.server.database import rows
from pgmb.server.sse.frames import ResumeToken, ticks_check
from pgmb.server.sse.matching import Entry, Interest, Sieve
from pgmb.types import Position

PAGE: Final = 1000
SIEVE_SECONDS: Final = 2.0
"""Time limit of a sieve per page."""
COSTLY_SIEVE_SECONDS: Final = 0.5
"""Time limit of a costly filter per page; see `pgmb_internal.is_costly`."""
_CONCURRENT_SIEVES: Final = 2
"""Sieves evaluated at a time, costly ones apart, to leave connections of the pool to others."""

_NEWEST: Final = "select tick, at, position::text from pgmb.newest_tick(%s)"
_PASSING: Final = (
    "select pgmb.passing_events(stream => %s::text, seqs => %s::bigint[],"
    " filter => %s::text, params => %s::jsonb, condition => %s::text)"
)
_TICKS: Final = "select tick, at, position::text from pgmb.ticks(%s, %s)"


class SieveFailed(Exception):  # noqa: N818
    """A filter or condition took too long, or raised an error at an event."""


class Tick(NamedTuple):
    """A numbered position."""

    number: int
    at: datetime | None
    position: Position

    def token(self, upto: Tick | None = None, seq: int = 0) -> ResumeToken:
        """The token of a reader that has all before this tick, and the events up to `seq` before `upto`."""
        upto = upto or self
        check = ticks_check(self.position, upto.position)
        return ResumeToken(self.position.epoch, self.number, upto.number, seq, check)


class Page(NamedTuple):
    """Consecutive events between two ticks. Readers share the entries, which are encoded once."""

    entries: list[Entry]
    is_last: bool


class StreamLog:
    """Reads one stream: its ticks, the events between two ticks, and which of them pass a sieve."""

    def __init__(self, broker: AsyncBroker, stream: str) -> None:
        self.stream = stream
        self._broker = broker
        self._slots = {costly: asyncio.Semaphore(_CONCURRENT_SIEVES) for costly in (False, True)}

    async def tick(self) -> None:
        """Create a tick, so that new events become readable. On a standby the primary does."""
        try:
            await self._broker.tick(self.stream)
        except StandbyError:
            return

    async def newest(self) -> Tick:
        (row,) = await rows(self._broker, _NEWEST, (self.stream,))
        return Tick(row[0], row[1], Position.parse(row[2]))

    async def ticks(self, numbers: Iterable[int]) -> dict[int, Tick]:
        """The ticks that still exist, by number."""
        found = await rows(self._broker, _TICKS, (self.stream, list(numbers)))
        return {row[0]: Tick(row[0], row[1], Position.parse(row[2])) for row in found}

    async def between(self, after: Tick, upto: Tick, seq: int) -> Page:
        """A page of the events between two ticks, after `seq`."""
        found = await self._broker.between(self.stream, after.position, upto.position, seq, PAGE, lake=False)
        token = after.token(upto)
        entries = [Entry(event, token._replace(seq=event.seq)) for event in found]
        return Page(entries, not may_go_on(found, PAGE))

    async def passing(self, sieve: Sieve, entries: Sequence[Entry], *, costly: bool) -> set[int]:
        """The seqs of the entries that pass a sieve. Raises SieveFailed."""
        within = COSTLY_SIEVE_SECONDS if costly else SIEVE_SECONDS
        try:
            async with self._slots[costly]:
                return await self._passing(sieve, entries, within)
        except (psycopg.errors.QueryCanceled, psycopg.DataError) as error:
            raise SieveFailed(str(error)) from error

    async def check(self, sieve: Sieve) -> bool:
        """Validate a sieve. Returns whether it may be costly."""
        try:
            # Without a timeout, a costly filter raises.
            await self._passing(sieve, [], 0)
        except TimeoutRequired:
            return True
        return False

    async def _passing(self, sieve: Sieve, entries: Sequence[Entry], within: float) -> set[int]:
        seqs = ",".join([str(entry.event.seq) for entry in entries])
        ((found,),) = await rows(self._broker, _PASSING, (self.stream, f"{{{seqs}}}", *sieve), within=within)
        return set(found)


_MOST_EVENTS: Final = 20_000
_MOST_EVENT_BYTES: Final = 16 << 20
_MOST_BATCHES: Final = 5_000
_MOST_CACHED_INTERESTS: Final = 64


class _Batch:
    """The events between two ticks that were read so far. Their numbers begin at `first`."""

    def __init__(self, after: Tick, upto: Tick, first: int) -> None:
        self.after = after
        self.upto = upto
        self.begin = after.token()
        self.token = after.token(upto)
        self.first = first
        self.seqs: list[int] = []
        self.size = 0


class Batches:
    """Numbers the events that this process reads, and finds the number at which a resume token stands.

    The newest batches are known, bounded in events and bytes: those with numbers from `first` to `end`.
    """

    def __init__(self, at: Tick, most: int = _MOST_EVENTS, most_bytes: int = _MOST_EVENT_BYTES) -> None:
        self.at = at
        """The tick before the current batch: everything before it was read."""
        self.first = 0
        self.end = 0
        self.current: _Batch | None = None
        """The batch that is being read."""
        self._batches: deque[_Batch] = deque()
        self._starting: dict[ResumeToken, _Batch] = {}
        """By the token before the batch, and by the token within it, without its seq."""
        self._most = most
        self._most_bytes = most_bytes
        self._size = 0

    def begin(self, upto: Tick) -> None:
        """Begin a batch where the last one ended."""
        batch = self.current = _Batch(self.at, upto, self.end)
        self._batches.append(batch)
        self._starting[batch.begin] = self._starting[batch.token] = batch

    def add(self, entries: Iterable[Entry]) -> None:
        """Number the next entries of the current batch."""
        assert self.current is not None  # noqa: S101
        for entry in entries:
            entry.number = self.end
            self.end += 1
            self.current.seqs.append(entry.event.seq)
            size = len(entry.event.raw) + 300
            self.current.size += size
            self._size += size

    def complete(self) -> None:
        """Complete the current batch, and forget the oldest ones beyond the limits."""
        assert self.current is not None  # noqa: S101
        self.at, self.current = self.current.upto, None
        while len(self._batches) > 1 and (
            self.end - self.first > self._most
            or self._size > self._most_bytes
            or len(self._batches) > _MOST_BATCHES
        ):
            gone = self._batches.popleft()
            del self._starting[gone.begin], self._starting[gone.token]
            self._size -= gone.size
            self.first = self._batches[0].first

    @property
    def boundary(self) -> int:
        """The number at which the current batch begins, or will begin."""
        return self.end if self.current is None else self.current.first

    def find(self, token: ResumeToken) -> int | None:
        """The number of the first event after a token; None if its batch is not known."""
        start = token._replace(seq=0)
        if start == self.at.token():
            return self.boundary
        batch = self._starting.get(start)
        if batch is None or token.from_tick == token.to_tick:
            return None if batch is None else batch.first
        if batch is self.current and token.seq > (batch.seqs[-1] if batch.seqs else 0):
            # Another process has read further than this one.
            return None
        return batch.first + bisect_right(batch.seqs, token.seq)

    def place(self, number: int) -> tuple[Tick, ResumeToken]:
        """The tick and the token of a reader that has all events below a known number."""
        batch = self.current
        if batch is None or number < batch.first:
            if number == self.end:
                return self.at, self.at.token()
            batch = next(batch for batch in reversed(self._batches) if batch.first <= number)
        if number == batch.first:
            return batch.after, batch.begin
        return batch.after, batch.token._replace(seq=batch.seqs[number - batch.first - 1])


@dataclass(slots=True)
class _Matched:
    """The entries from one number to another that match an interest."""

    first: int
    end: int
    entries: list[Entry] = field(default_factory=list[Entry])


class Recent:
    """A tail's newest entries, in memory: of the events from `first` to `end`, all or those that pass."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.first = self.end = batches.boundary
        self._entries: list[Entry] = []
        self._matched: dict[Interest, _Matched] = {}

    def add(self, entries: Iterable[Entry], end: int) -> None:
        """Add the next entries, below the number `end`. The oldest go with their batches."""
        self._entries.extend(entries)
        self.end = end
        if self.first < self.batches.first:
            self.first = self.batches.first
            del self._entries[: _index(self._entries, self.first)]
            self._matched.clear()

    def after(self, number: int, most: int) -> list[Entry]:
        """The next entries from a number on."""
        first = _index(self._entries, number)
        return self._entries[first : first + most]

    def since(self, token: ResumeToken, interest: Interest) -> list[Entry] | None:
        """The entries after a token that match; None if memory does not hold them."""
        number = self.batches.find(token)
        if number is None or not self.first <= number <= self.end:
            return None
        # Many readers reconnect together, with equal interests.
        matched = self._matched.get(interest)
        if matched is None or matched.first > number:
            if len(self._matched) >= _MOST_CACHED_INTERESTS:
                self._matched.clear()
            matched = self._matched[interest] = _Matched(number, number)
        fresh = self._entries[_index(self._entries, matched.end) :]
        matched.entries += [entry for entry in fresh if interest.matches(entry.event, entry.document)]
        matched.end = self.end
        return matched.entries[_index(matched.entries, number) :]


def _index(entries: Sequence[Entry], number: int) -> int:
    return bisect_left(entries, number, key=lambda entry: entry.number)
