"""Sends returning readers what they missed, until they can join the tail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

import psycopg

from pgmb._core.cursor import later
from pgmb._core.wire import may_go_on
from pgmb.errors import ForeignPosition, HistoryGone, PositionLost
from pgmb.server.instrumentation import Counters
from pgmb.server.limits import Limits
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import (
    ResumeToken,
)
from pgmb.server.sse.history import PAGE, Tick
from pgmb.server.sse.matching import Entry, EventFields, FilterQuery
from pgmb.server.sse.tail import Tail
from pgmb.server.tasks import SharedCache
from pgmb.types import Event

Found = TypeVar("Found")

_CONCURRENT_READS: Final = 4
"""Concurrent reads, to leave connections of the pool to others."""
_CACHED_READS: Final = 64
"""Cached results per kind of read. Results never change."""
_WAIT_SECONDS: Final = 1.0


class HistoryMissing(Exception):  # noqa: N818
    """The missed events are not available, so the client must reload its state."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Replay:
    """Sends returning readers what they missed. Readers of the same events share the reads."""

    def __init__(self, tail: Tail, limits: Limits, counts: Counters) -> None:
        self._tail = tail
        self._limits = limits
        self._counts = counts
        self._read_slots = asyncio.Semaphore(_CONCURRENT_READS)
        self._ticks: SharedCache[tuple[int, int], dict[int, Tick]] = SharedCache(_CACHED_READS)
        self._pages: SharedCache[tuple[int, int, int], list[Event]] = SharedCache(_CACHED_READS)
        self._passing: SharedCache[tuple[int, int, int, FilterQuery], set[int]] = SharedCache(_CACHED_READS)

    async def catch_up(self, reader: Reader, token: ResumeToken) -> AsyncGenerator[list[Entry]]:
        """Yield the entries after a token, in order. When it ends, the reader has joined the tail."""
        tail = self._tail
        while not reader.ended:
            missed = tail.join(reader, token)
            if missed is not None:
                self._counts.sse_replayed += len(missed)
                yield missed
                return
            after, upto = await self._span(token)
            if after.number == upto.number and not later(tail.at.position, after.position):
                if not later(after.position, tail.at.position):
                    # Two ticks at the same position.
                    token = tail.at.token()
                else:
                    # Another process had read further than this one.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(tail.advanced(), _WAIT_SECONDS)
                continue
            if after.number == upto.number:
                upto = tail.at
                token = after.token(upto)
            seq = token.seq if token.from_tick != token.to_tick else 0
            # The limit is on how far behind the tail the reader is, not on what it has caught up with: a slow
            # reader of a busy stream is sent more than that before it joins.
            examined = 0
            while not reader.ended:
                events = await self._page(after, upto, seq)
                examined += len(events)
                if examined > self._limits.replay_events:
                    raise HistoryMissing("too_many")
                entries = await self._matching(reader, events, after, upto, seq)
                self._counts.sse_replayed += len(entries)
                if entries:
                    yield entries
                if not may_go_on(events, PAGE):
                    break
                seq = events[-1].seq
            token = upto.token()

    async def _span(self, token: ResumeToken) -> tuple[Tick, Tick]:
        """The two ticks of a token. Raises HistoryMissing."""
        if token.epoch != self._tail.at.position.epoch:
            raise HistoryMissing("epoch")
        numbers = (token.from_tick, token.to_tick)
        ticks = await self._ticks.get(numbers, partial(self._read, self._tail.log.ticks, numbers))
        after, upto = ticks.get(token.from_tick), ticks.get(token.to_tick)
        if after is None or upto is None or later(after.position, upto.position):
            raise HistoryMissing("history_gone")
        if after.token(upto, token.seq) != token:
            raise HistoryMissing("lost")
        oldest = datetime.now(UTC) - timedelta(seconds=self._limits.replay_age)
        if after.at is not None and after.at < oldest:
            raise HistoryMissing("too_old")
        return after, upto

    async def _page(self, after: Tick, upto: Tick, seq: int) -> list[Event]:
        try:
            return await self._pages.get(
                (after.number, upto.number, seq),
                partial(self._read, self._tail.log.between, after, upto, seq),
            )
        except HistoryGone as error:
            raise HistoryMissing("history_gone") from error
        except (PositionLost, ForeignPosition) as error:
            raise HistoryMissing("lost") from error

    async def _read(self, read: Callable[..., Coroutine[Any, Any, Found]], *given: Any) -> Found:
        async with self._read_slots:
            return await read(*given)

    async def _matching(
        self, reader: Reader, events: list[Event], after: Tick, upto: Tick, seq: int
    ) -> list[Entry]:
        interest = reader.interest
        found = [event for event in events if interest.matches(event, EventFields(event))]
        query = interest.filter_query
        if query is not None and found:
            try:
                passed = await self._passing.get(
                    (after.number, upto.number, seq, query),
                    partial(self._read, self._tail.log.passing, query, after, upto, seq),
                )
            except psycopg.errors.QueryCanceled:
                self._tail.refuse(query, reader)
                raise
            found = [event for event in found if event.seq in passed]
        return [Entry(event, after.token(upto, event.seq)) for event in found]
