"""Reads a stream once for all its readers in this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, TypeAlias

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout
from starlette.types import Message

from pgmb._async.listener import AsyncSubscription
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS, Pace
from pgmb._core.cursor import later
from pgmb._core.wire import may_go_on
from pgmb.errors import ForeignPosition, HistoryGone, PgmbError, PositionLost
from pgmb.server.instrumentation import Counters
from pgmb.server.problems import Problem, busy
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import (
    ResumeToken,
    position_frame,
    reset_frame,
)
from pgmb.server.sse.history import PAGE, RecentEvents, StreamLog, Tick
from pgmb.server.sse.matching import Entry, FilterQuery, Interest, ReaderIndex
from pgmb.server.tasks import cancel_and_wait
from pgmb.types import Position

logger = logging.getLogger("pgmb.server")

_LISTENING_PAUSE: Final = 10.0
_FIRST_RETRY_PAUSE: Final = 0.1
_SLOW_PAGE_SECONDS: Final = 0.05
_LONGEST_REST_SECONDS: Final = 0.1
"""Pause between reads under load: larger batches make each event cheaper."""
_MOST_COSTLY_FILTERS: Final = 4
"""Costly filters per stream. Each may delay a page by half a second for all readers."""
_CONCURRENT_COSTLY_FILTERS: Final = 2
"""Costly filters evaluated at a time, to leave connections of the pool to others."""
_REFUSED_SECONDS: Final = 60.0
_MOST_REFUSED: Final = 10_000
_READERS_PER_STEP: Final = 200
"""Readers served before other tasks run."""

_Outgoing: TypeAlias = tuple[Reader, Message, int]


class Tail:
    """Reads a stream from tick to tick, and hands every event to the readers that it matches."""

    def __init__(
        self, log: StreamLog, subscription: AsyncSubscription, counts: Counters, at_once: int = 100
    ) -> None:
        self.log = log
        self.readers: set[Reader] = set()
        self.filters: Counter[FilterQuery] = Counter()
        """The readers' filters, which the database evaluates."""
        self.costly: set[FilterQuery] = set()
        """The filters that may be slow."""
        self.too_slow: dict[Hashable, float] = {}
        """Filters that took too long, and their clients, with the time until which they are refused."""
        self._costly_at_once = asyncio.Semaphore(_CONCURRENT_COSTLY_FILTERS)
        self._subscription = subscription
        self._counts = counts
        self._at_once = at_once
        self._index: ReaderIndex[Reader] = ReaderIndex()
        self._at: Tick
        self._upto: Tick | None = None
        self._seq = 0
        self._took = 0.0
        """Seconds that reading and sending the last page took."""
        self._recent: RecentEvents
        self._advanced = asyncio.Event()
        self._sending = asyncio.Lock()
        """Held while a page has reached some readers and not others."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start reading at the stream's newest tick. Raises StreamNotFound."""
        await self.log.tick()
        self._begin(await self.log.newest())
        self._task = asyncio.create_task(self._run(), name=f"pgmb tail {self.log.stream}")

    async def close(self) -> None:
        """Stop reading, and end all readers."""
        self._subscription.close()
        for reader in list(self.readers):
            reader.end()
        if self._task is not None:
            await cancel_and_wait(self._task)

    @property
    def at(self) -> Tick:
        """The tick up to which everything was read."""
        return self._at

    @property
    def token(self) -> ResumeToken:
        """The token of a reader that joins now."""
        return self._recent.token

    @property
    def earliest(self) -> ResumeToken:
        """The token before the oldest event that is kept."""
        at = self._at.position
        return Tick(0, None, Position(at.epoch, at.stream, 0, 0, "3:3:", 0, 3)).token()

    def join(self, reader: Reader, token: ResumeToken | None = None) -> list[Entry] | None:
        """Send a reader all events from now on. Returns those that it missed since the token.

        Returns None, without joining, if memory does not hold them.
        """
        missed = [] if token is None else self._recent.since(token, reader.interest)
        if missed is not None:
            self.readers.add(reader)
            self._index.add(reader, reader.interest)
        return missed

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)
        self._index.remove(reader, reader.interest)

    async def register(self, interest: Interest, client_id: Hashable = None) -> None:
        """Evaluate an interest's filter from now on. Raises if it was too slow, or there are too many."""
        query = interest.filter_query
        if query is None:
            return
        self._assert_fast(query)
        if query not in self.filters:
            costly = await self.log.check(query)
            # Another reader may have registered it during the check.
            if query not in self.filters and costly:
                self._assert_fast(client_id)
                if len(self.costly) >= _MOST_COSTLY_FILTERS:
                    raise busy("too many costly filters on this process")
                self.costly.add(query)
        self.filters[query] += 1

    def unregister(self, interest: Interest) -> None:
        if interest.filter_query is not None:
            self.filters[interest.filter_query] -= 1
            if not self.filters[interest.filter_query]:
                del self.filters[interest.filter_query]
                self.costly.discard(interest.filter_query)

    def refuse(self, query: FilterQuery, *readers: Reader) -> None:
        """Disconnect the readers of a filter that took too long.

        For a minute, the filter is refused, and so are other costly filters of the same clients.
        """
        now = time.monotonic()
        logger.warning("stream %s: a filter took too long: %.200s", self.log.stream, query[0])
        self.too_slow = {slow: until for slow, until in self.too_slow.items() if until > now}
        theirs = {*readers, *(one for one in self.readers if one.interest.filter_query == query)}
        for slow in (query, *{one.client_id for one in theirs}):
            if len(self.too_slow) < _MOST_REFUSED:
                self.too_slow[slow] = now + _REFUSED_SECONDS
        for reader in theirs:
            reader.drop()

    def _assert_fast(self, slow: Hashable) -> None:
        if self.too_slow.get(slow, 0.0) > time.monotonic():
            raise Problem(
                422, "filter_too_slow", "the filter takes too long", hint="Ask for less, or create a queue."
            )

    async def advanced(self) -> None:
        """Wait until the next tick was read."""
        await self._advanced.wait()

    async def heartbeat(self, part: int, parts: int) -> None:
        """Send a heartbeat with the current token to one slice of the readers."""
        async with self._sending:
            quiet = position_frame(str(self.token))
            for reader in list(self.readers):
                if reader.number % parts == part:
                    reader.heartbeat(quiet)

    def _begin(self, tick: Tick) -> None:
        self._at = tick
        self._upto = None
        self._recent = RecentEvents(tick)

    async def _run(self) -> None:
        pace = Pace(0.03)
        failures = 0
        woken = False
        while True:
            try:
                if not woken:
                    await self.log.tick()
                if await self._read():
                    pace.found()
                failures = 0
                relying = self._subscription.healthy
                woken = await self._subscription.wait(_LISTENING_PAUSE if relying else pace.pause())
            except (HistoryGone, PositionLost, ForeignPosition) as error:
                logger.warning("stream %s: %s", self.log.stream, error)
                await self._start_over("history_gone" if isinstance(error, HistoryGone) else "lost")
            except PoolClosed:
                return
            except (psycopg.Error, PoolTimeout, PgmbError, OSError) as error:
                pause = min(_FIRST_RETRY_PAUSE * 2**failures, LONGEST_RETRY_SECONDS)
                failures += 1
                logger.warning("stream %s: %s; retrying in %.1f s", self.log.stream, error, pause)
                woken = False
                await asyncio.sleep(pause)

    async def _start_over(self, reason: str) -> None:
        """Continue at the newest tick, and tell all readers that events are missing."""
        try:
            newest = await self.log.newest()
        except (psycopg.Error, PoolTimeout, PgmbError, OSError):
            await asyncio.sleep(_FIRST_RETRY_PAUSE)
            return
        self._begin(newest)
        said = reset_frame(str(self.token), reason)
        for reader in list(self.readers):
            self._counts.sse_reset += 1
            reader.give(said)
            reader.wake()

    async def _read(self) -> bool:
        """Read up to the newest tick. After an error, the batch that was begun is continued."""
        if self._upto is None:
            if self._took > _SLOW_PAGE_SECONDS:
                # The ticker's last tick is old by now, and the next read is equally far away.
                await self.log.tick()
            newest = await self.log.newest()
            if newest.position.epoch != self._at.position.epoch:
                await self._start_over("epoch")
                return True
            if newest.position.stream != self._at.position.stream:
                await self._start_over("lost")
                return True
            if not later(newest.position, self._at.position):
                if newest.number > 0 and newest.position != self._at.position:
                    # A failover lost this tick, and the read raises; or this standby lags behind.
                    await self.log.between(self._at, newest, 0)
                return False
            self._upto, self._seq = newest, 0
            self._recent.begin(newest)
        upto = self._upto
        while True:
            began = time.monotonic()
            events = await self.log.between(self._at, upto, self._seq)
            passing = await self._passing(upto) if events else {}
            # In parts: readers send in between, and do not exceed their limits.
            for first in range(0, len(events), self._at_once):
                part = events[first : first + self._at_once]
                async with self._sending:
                    outgoing = self._outgoing(self._recent.add(part, passing), passing)
                    self._seq = part[-1].seq
                    await self._give(outgoing)
            self._took = time.monotonic() - began
            if events:
                await asyncio.sleep(min(self._took / 16, _LONGEST_REST_SECONDS))
            if not may_go_on(events, PAGE):
                break
        self._recent.end()
        self._at, self._upto = upto, None
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()
        return True

    async def _passing(self, upto: Tick) -> dict[FilterQuery, set[int]]:
        """Per filter, the seqs on the page that pass. Each filter has its own time limit."""
        asked = [
            await self._ask(query, upto, costly=False)
            for query in list(self.filters)
            if query not in self.costly
        ]
        asked += await asyncio.gather(*[self._ask(query, upto, costly=True) for query in self.costly])
        return {query: passed for query, passed in asked if passed is not None}

    async def _ask(
        self, query: FilterQuery, upto: Tick, *, costly: bool
    ) -> tuple[FilterQuery, set[int] | None]:
        try:
            if not costly:
                return query, await self.log.passing(query, self._at, upto, self._seq, costly=False)
            async with self._costly_at_once:
                return query, await self.log.passing(query, self._at, upto, self._seq)
        except psycopg.errors.QueryCanceled:
            self.refuse(query)
            return query, None

    def _outgoing(self, entries: Sequence[Entry], passing: dict[FilterQuery, set[int]]) -> list[_Outgoing]:
        """Which message goes to which reader. A reader that joins later gets them from memory."""
        # Readers with equal interests get the same message, which is encoded once.
        wanted: dict[int, tuple[set[Reader], list[Entry]]] = {}
        for entry in entries:
            for readers in self._index.matching(entry.event, entry.document, passing):
                wanted.setdefault(id(readers), (readers, []))[1].append(entry)
        outgoing: list[_Outgoing] = []
        for readers, wants in wanted.values():
            written: dict[bool, Message] = {}
            for reader in readers:
                message = written.get(reader.named)
                if message is None:
                    frames = b"".join([entry.frame(reader.named) for entry in wants])
                    message = {"type": "http.response.body", "body": frames, "more_body": True}
                    written[reader.named] = message
                outgoing.append((reader, message, len(wants)))
            self._counts.sse_events += len(readers) * len(wants)
        self._counts.sse_bytes += sum(len(message["body"]) for _, message, _ in outgoing)
        return outgoing

    async def _give(self, outgoing: Sequence[_Outgoing]) -> None:
        for first in range(0, len(outgoing), _READERS_PER_STEP):
            for reader, message, events in outgoing[first : first + _READERS_PER_STEP]:
                reader.offer(message, events)
            # Let other tasks run, the ticker among them.
            await asyncio.sleep(0)
