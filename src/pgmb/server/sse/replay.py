"""Sends returning readers what they missed, until they can join the tail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from pgmb._core.cursor import later
from pgmb.errors import ForeignPosition, HistoryGone, PositionLost
from pgmb.server.instrumentation import Counters
from pgmb.server.limits import Limits
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import ResumeToken
from pgmb.server.sse.history import Page, SieveFailed, StreamLog, Tick
from pgmb.server.sse.matching import Entry, Sieve
from pgmb.server.sse.tail import FilterTail, Tail
from pgmb.server.tasks import SharedCache

Found = TypeVar("Found")

_CONCURRENT_READS: Final = 4
"""Concurrent reads, to leave connections of the pool to others."""
_CACHED_PAGES: Final = 16
_CACHED_READS: Final = 64
"""Cached results per kind of read. Results never change."""
_WAIT_SECONDS: Final = 1.0


class HistoryMissing(Exception):  # noqa: N818
    """The missed events are not available, so the client must reload its state."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Replay:
    """Sends returning readers what they missed. All readers of a stream share the reads."""

    def __init__(self, log: StreamLog, limits: Limits, counts: Counters) -> None:
        self._log = log
        self._limits = limits
        self._counts = counts
        self._read_slots = asyncio.Semaphore(_CONCURRENT_READS)
        self._ticks: SharedCache[tuple[int, int], dict[int, Tick]] = SharedCache(_CACHED_READS)
        self._pages: SharedCache[tuple[int, int, int], Page] = SharedCache(_CACHED_PAGES)
        self._passing: SharedCache[tuple[int, int, int, Sieve], set[int]] = SharedCache(_CACHED_READS)

    async def catch_up(self, tail: Tail, reader: Reader, token: ResumeToken) -> AsyncGenerator[list[Entry]]:
        """Yield the entries after a token, in order. When it ends, the reader has joined the tail."""
        examined = 0
        while not reader.ended:
            missed = tail.join(reader, token)
            if missed is not None:
                self._counts.sse_replayed += len(missed)
                yield missed
                return
            # What is cached is returned without suspending. Other tasks run in each turn.
            await asyncio.sleep(0)
            after, upto = await self._span(tail, token)
            if after.number == upto.number:
                # A span begins. The limit is on how far behind the tail the reader is, not on what it has
                # caught up with: a slow reader of a busy stream is sent more than that before it joins.
                upto, examined = tail.at, 0
                if not later(upto.position, after.position):
                    if token == upto.token() or later(after.position, upto.position):
                        # Another process, or the tail of another filter, had read further than this one.
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(tail.advanced(), _WAIT_SECONDS)
                    else:
                        # Two ticks at the same position.
                        token = upto.token()
                    continue
                token = after.token(upto)
            page = await self._page(after, upto, token.seq)
            examined += len(page.entries)
            if examined > self._limits.replay_events:
                raise HistoryMissing("too_many")
            entries = await self._matching(tail, reader, page, (after.number, upto.number, token.seq))
            self._counts.sse_replayed += len(entries)
            if entries:
                yield entries
            token = upto.token() if page.is_last else after.token(upto, page.entries[-1].event.seq)

    async def _span(self, tail: Tail, token: ResumeToken) -> tuple[Tick, Tick]:
        """The two ticks of a token. Raises HistoryMissing."""
        if token.epoch != tail.at.position.epoch:
            raise HistoryMissing("epoch")
        numbers = (token.from_tick, token.to_tick)
        ticks = await self._ticks.get(numbers, partial(self._read, self._log.ticks, numbers))
        after, upto = ticks.get(token.from_tick), ticks.get(token.to_tick)
        if after is None or upto is None or later(after.position, upto.position):
            raise HistoryMissing("history_gone")
        if after.token(upto, token.seq) != token:
            raise HistoryMissing("lost")
        oldest = datetime.now(UTC) - timedelta(seconds=self._limits.replay_age)
        if after.at is not None and after.at < oldest:
            raise HistoryMissing("too_old")
        return after, upto

    async def _page(self, after: Tick, upto: Tick, seq: int) -> Page:
        try:
            return await self._pages.get(
                (after.number, upto.number, seq),
                partial(self._read, self._log.between, after, upto, seq),
            )
        except HistoryGone as error:
            raise HistoryMissing("history_gone") from error
        except (PositionLost, ForeignPosition) as error:
            raise HistoryMissing("lost") from error

    async def _read(self, read: Callable[..., Coroutine[Any, Any, Found]], *given: Any) -> Found:
        async with self._read_slots:
            return await read(*given)

    async def _matching(
        self, tail: Tail, reader: Reader, page: Page, place: tuple[int, int, int]
    ) -> list[Entry]:
        matches = reader.interest.matches
        found = [entry for entry in page.entries if matches(entry.event, entry.document)]
        if not isinstance(tail, FilterTail) or not found:
            return found
        ask = partial(self._log.passing, tail.sieve, page.entries, costly=tail.costly)
        try:
            passing = await self._passing.get((*place, tail.sieve), ask)
        except SieveFailed as error:
            tail.fail(error, reader)
            return []
        return [entry for entry in found if entry.event.seq in passing]
