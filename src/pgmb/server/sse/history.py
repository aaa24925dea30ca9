"""A stream's past: reading ticks and events from the database, and recent events in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from pgmb._async.broker import AsyncBroker
from pgmb.errors import StandbyError, TimeoutRequired
from pgmb.server.database import rows
from pgmb.server.sse.frames import (
    ResumeToken,
    ticks_check,
)
from pgmb.server.sse.matching import Entry, FilterQuery, Interest
from pgmb.types import Event, Position

PAGE: Final = 1000
FILTER_SECONDS: Final = 2.0
"""Time limit of a filter per page."""
COSTLY_FILTER_SECONDS: Final = 0.5
"""Time limit of a costly filter per page; see `pgmb_internal.is_costly`."""

_NEWEST: Final = "select tick, at, position::text from pgmb.newest_tick(%s)"
_FILTERED: Final = (
    "select seq, topic from pgmb.between_filtered(stream => %s::text, after => %s::pgmb.position,"
    " upto => %s::pgmb.position, after_seq => %s::bigint, max => %s::bigint, filter => %s::text,"
    " params => %s::jsonb)"
)
_TICKS: Final = "select tick, at, position::text from pgmb.ticks(%s, %s)"


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


class StreamLog:
    """Reads one stream: its ticks, the events between two ticks, and which of them pass a filter."""

    def __init__(self, broker: AsyncBroker, stream: str) -> None:
        self.stream = stream
        self._broker = broker

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

    async def between(self, after: Tick, upto: Tick, seq: int) -> list[Event]:
        """A page of the events between two ticks, after `seq`."""
        return await self._broker.between(self.stream, after.position, upto.position, seq, PAGE, lake=False)

    async def passing(
        self, query: FilterQuery, after: Tick, upto: Tick, seq: int, *, costly: bool = True
    ) -> set[int]:
        """The seqs on that page that pass a filter. Raises QueryCanceled when it takes too long."""
        within = COSTLY_FILTER_SECONDS if costly else FILTER_SECONDS
        page = await self._filtered(query, str(after.position), str(upto.position), seq, PAGE, within)
        return {seq for seq, topic in page if topic is not None}

    async def check(self, query: FilterQuery) -> bool:
        """Validate a filter. Returns whether it may be costly."""
        try:
            # Without positions no event is read. Without a timeout, a costly filter raises.
            await self._filtered(query, None, None, 0, 0, 0)
        except TimeoutRequired:
            return True
        return False

    async def _filtered(
        self, query: FilterQuery, after: str | None, upto: str | None, seq: int, most: int, within: float
    ) -> list[Any]:
        given = (self.stream, after, upto, seq, most, *query)
        return await rows(self._broker, _FILTERED, given, within=within)


_MOST_EVENTS: Final = 20_000
_MOST_EVENT_BYTES: Final = 16 << 20
_MOST_BATCHES: Final = 5_000
_MOST_CACHED_INTERESTS: Final = 64
_END: Final = 1 << 63


class TickBatch:
    """The events between two ticks that were read so far."""

    def __init__(self, after: Tick, upto: Tick) -> None:
        self.after = after
        self.upto = upto
        self.begin = after.token()
        self.token = after.token(upto)
        self.entries: list[Entry] = []
        self.passing: dict[FilterQuery, set[int]] = {}
        self.size = 0
        self.complete = False
        self._matching: dict[Interest, list[Entry] | None] = {}

    def matching(self, interest: Interest, after: int = 0) -> list[Entry] | None:
        """The entries after a seq that match; None if the filter was not evaluated for this batch."""
        if interest in self._matching:
            found = self._matching[interest]
        else:
            found = self._found(interest)
            if self.complete and len(self._matching) < _MOST_CACHED_INTERESTS:
                # Many readers reconnect together, with equal interests.
                self._matching[interest] = found
        if found is None or not after:
            return found
        return [entry for entry in found if entry.event.seq > after]

    def _found(self, interest: Interest) -> list[Entry] | None:
        found = self.entries
        if interest.filter_query is not None and found:
            passed = self.passing.get(interest.filter_query)
            if passed is None:
                return None
            found = [entry for entry in found if entry.event.seq in passed]
        return [entry for entry in found if interest.matches(entry.event, entry.document)]


class RecentEvents:
    """The newest batches, in memory, bounded in events and bytes."""

    def __init__(self, at: Tick, most: int = _MOST_EVENTS, most_bytes: int = _MOST_EVENT_BYTES) -> None:
        self.at = at
        """The tick before the current batch: everything before it was read."""
        self._batches: deque[TickBatch] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self._events = 0
        self._size = 0

    @property
    def token(self) -> ResumeToken:
        """The token of a reader that has everything read so far."""
        if self._batches and self._batches[-1].upto is not self.at:
            current = self._batches[-1]
            last = current.entries[-1].event.seq if current.entries else 0
            return current.token._replace(seq=last)
        return self.at.token()

    def begin(self, upto: Tick) -> None:
        """Begin a batch where the last one ended."""
        self._batches.append(TickBatch(self.at, upto))

    def add(self, events: Iterable[Event], passing: Mapping[FilterQuery, set[int]]) -> list[Entry]:
        """Add a page to the current batch."""
        batch = self._batches[-1]
        added = [Entry(event, batch.token._replace(seq=event.seq)) for event in events]
        size = sum(len(entry.event.raw) + 300 for entry in added)
        batch.entries.extend(added)
        batch.size += size
        for query, passed in passing.items():
            # A filter that is new within a batch was not evaluated for the batch's earlier pages.
            if query in batch.passing or len(batch.entries) == len(added):
                batch.passing.setdefault(query, set()).update(passed)
        self._events += len(added)
        self._size += size
        return added

    def end(self) -> None:
        """Complete the current batch, and drop the oldest ones beyond the limits."""
        batch = self._batches[-1]
        batch.complete = True
        self.at = batch.upto
        while len(self._batches) > 1 and (
            self._events > self._most or self._size > self._most_bytes or len(self._batches) > _MOST_BATCHES
        ):
            gone = self._batches.popleft()
            self._events -= len(gone.entries)
            self._size -= gone.size

    def _read_up_to(self, batch: TickBatch) -> int:
        if batch.upto is self.at or batch is not self._batches[-1]:
            return _END
        return batch.entries[-1].event.seq if batch.entries else 0

    def since(self, token: ResumeToken, interest: Interest) -> list[Entry] | None:
        """The entries after a token; None if memory does not hold them."""
        if token.epoch != self.at.position.epoch:
            return None
        missed: list[Entry] = []
        start = token._replace(seq=0)
        if token.from_tick != token.to_tick:
            batches = list(self._batches)
            for index, batch in enumerate(batches):
                if batch.token == start:
                    rest = batch.matching(interest, token.seq)
                    later = batches[index + 1 :]
                    break
            else:
                return None
            if rest is None or token.seq > self._read_up_to(batch):
                # Another process has read further than this one.
                return None
            missed.extend(rest)
        else:
            later = list(self._batches)
            while later and later[0].begin != start:
                del later[0]
            if not later:
                return [] if start == self.at.token() else None
        for batch in later:
            found = batch.matching(interest)
            if found is None:
                return None
            missed.extend(found)
        return missed
