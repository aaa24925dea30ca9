"""One stream, read once for all of its readers in this process."""

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
from pgmb._core.concurrency import Pace
from pgmb._core.cursor import later
from pgmb.errors import ForeignPosition, HistoryGone, PgmbError, PositionLost
from pgmb.server.counts import Counts
from pgmb.server.problems import Problem, busy
from pgmb.server.sse import frame
from pgmb.server.sse.index import Index
from pgmb.server.sse.interest import Interest, Question
from pgmb.server.sse.log import PAGE, Log, Tick
from pgmb.server.sse.mark import Mark
from pgmb.server.sse.reader import Reader
from pgmb.server.sse.recent import Entry, Recent
from pgmb.server.tasks import end
from pgmb.types import Position

logger = logging.getLogger("pgmb.server")

_RELYING: Final = 10.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_LONG: Final = 0.05
_LONGEST_REST: Final = 0.1
"""Between two reads, when sending takes long: more events go together, and each costs less."""
_MOST_COSTLY: Final = 4
"""Filters of a stream that might take long. Each may use half a second of a page's way to all readers."""
_COSTLY_AT_ONCE: Final = 2
"""Of them: the broker's connections are for others too."""
_REFUSED_FOR: Final = 60.0
_MOST_REFUSED: Final = 10_000
_IN_ONE_GO: Final = 200
"""Readers that are given something before others get their turn."""

_Gift: TypeAlias = tuple[Reader, Message, int]


class Tail:
    """Reads from tick to tick, and gives every event to those who ask for it."""

    def __init__(self, log: Log, subscription: AsyncSubscription, counts: Counts, at_once: int = 100) -> None:
        self.log = log
        self.readers: set[Reader] = set()
        self.questions: Counter[Question] = Counter()
        """The filters that readers have, which the database answers."""
        self.costly: set[Question] = set()
        """Those of them that might take long."""
        self.too_slow: dict[Hashable, float] = {}
        """Filters that took too long and whose they were, and until when they are refused."""
        self._costly_at_once = asyncio.Semaphore(_COSTLY_AT_ONCE)
        self._subscription = subscription
        self._counts = counts
        self._at_once = at_once
        self._index: Index[Reader] = Index()
        self._at: Tick
        self._upto: Tick | None = None
        self._seq = 0
        self._took = 0.0
        """Seconds that the last page took, to read and to give to all."""
        self._recent: Recent
        self._advanced = asyncio.Event()
        self._giving = asyncio.Lock()
        """Held while some have been given what others are still to get."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin where the stream is now. StreamNotFound if there is none."""
        await self.log.tick()
        self._begin(await self.log.newest())
        self._task = asyncio.create_task(self._run(), name=f"pgmb tail {self.log.stream}")

    async def close(self) -> None:
        """Read no more. Readers are ended."""
        self._subscription.close()
        for reader in list(self.readers):
            reader.end()
        if self._task is not None:
            await end(self._task)

    @property
    def at(self) -> Tick:
        """The tick that was read up to."""
        return self._at

    @property
    def mark(self) -> Mark:
        """Where a reader stands that joins now."""
        return self._recent.mark

    @property
    def earliest(self) -> Mark:
        """Where a reader stands that has nothing of what is kept."""
        at = self._at.position
        return Tick(0, None, Position(at.epoch, at.stream, 0, 0, "3:3:", 0, 3)).mark()

    def join(self, reader: Reader, mark: Mark | None = None) -> list[Entry] | None:
        """Give a reader what comes from now on. Returns what it missed; None, and it is not joined, if that
        is not in memory.
        """
        missed = [] if mark is None else self._recent.since(mark, reader.interest)
        if missed is not None:
            self.readers.add(reader)
            self._index.add(reader, reader.interest)
        return missed

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)
        self._index.remove(reader, reader.interest)

    async def announce(self, interest: Interest, who: Hashable = None) -> None:
        """A reader with this interest is about to come: its filter is asked from now on."""
        question = interest.question
        if question is None:
            return
        self._assert_fast(question)
        if question not in self.questions:
            costly = await self.log.check(question)
            # Others came meanwhile.
            if question not in self.questions and costly:
                self._assert_fast(who)
                if len(self.costly) >= _MOST_COSTLY:
                    raise busy("too many costly filters are read here")
                self.costly.add(question)
        self.questions[question] += 1

    def withdraw(self, interest: Interest) -> None:
        if interest.question is not None:
            self.questions[interest.question] -= 1
            if not self.questions[interest.question]:
                del self.questions[interest.question]
                self.costly.discard(interest.question)

    def refuse(self, question: Question, *readers: Reader) -> None:
        """A filter took too long: its readers are sent away. It is refused for a while, and so are other
        filters of theirs that might take long.
        """
        now = time.monotonic()
        logger.warning("stream %s: a filter took too long: %.200s", self.log.stream, question[0])
        self.too_slow = {slow: until for slow, until in self.too_slow.items() if until > now}
        theirs = {*readers, *(one for one in self.readers if one.interest.question == question)}
        for slow in (question, *{one.who for one in theirs}):
            if len(self.too_slow) < _MOST_REFUSED:
                self.too_slow[slow] = now + _REFUSED_FOR
        for reader in theirs:
            reader.drop()

    def _assert_fast(self, slow: Hashable) -> None:
        if self.too_slow.get(slow, 0.0) > time.monotonic():
            raise Problem(
                422, "filter_too_slow", "the filter takes too long", hint="Ask for less, or create a queue."
            )

    async def advanced(self) -> None:
        """Until it has read up to another tick."""
        await self._advanced.wait()

    async def beat(self, part: int, parts: int) -> None:
        """Tell readers that nothing came for where they stand: one part of them at a time."""
        async with self._giving:
            quiet = frame.place(str(self.mark))
            for reader in list(self.readers):
                if reader.number % parts == part:
                    reader.beat(quiet)

    def _begin(self, tick: Tick) -> None:
        self._at = tick
        self._upto = None
        self._recent = Recent(tick)

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
                relying = pace.at_rest and self._subscription.healthy
                woken = await self._subscription.wait(_RELYING if relying else pace.pause())
            except (HistoryGone, PositionLost, ForeignPosition) as error:
                logger.warning("stream %s: %s", self.log.stream, error)
                await self._start_over("history_gone" if isinstance(error, HistoryGone) else "lost")
            except PoolClosed:
                return
            except (psycopg.Error, PoolTimeout, PgmbError, OSError) as error:
                pause = min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE)
                failures += 1
                logger.warning("stream %s: %s; again in %.1f s", self.log.stream, error, pause)
                woken = False
                await asyncio.sleep(pause)

    async def _start_over(self, reason: str) -> None:
        """Events are gone that nobody here has read."""
        try:
            newest = await self.log.newest()
        except (psycopg.Error, PoolTimeout, PgmbError, OSError):
            await asyncio.sleep(_FIRST_PAUSE)
            return
        self._begin(newest)
        said = frame.reset(str(self.mark), reason)
        for reader in list(self.readers):
            self._counts.sse_reset += 1
            reader.give(said)
            reader.wake()

    async def _read(self) -> bool:
        """On to the newest tick. A batch that was begun is read to its end, whatever happened between."""
        if self._upto is None:
            if self._took > _LONG:
                # Whoever ticks did so a while ago by now, and the next read is as far away.
                await self.log.tick()
            newest = await self.log.newest()
            if newest.position.epoch != self._at.position.epoch:
                await self._start_over("epoch")
                return True
            if newest.position.stream != self._at.position.stream:
                await self._start_over("lost")
                return True
            if not later(newest.position, self._at.position):
                if 0 < newest.number < self._at.number:
                    # This one was lost in a failover, and is refused; or it has not come to this replica.
                    await self.log.between(self._at, newest, 0)
                return False
            self._upto, self._seq = newest, 0
            self._recent.begin(newest)
        upto = self._upto
        while True:
            began = time.monotonic()
            events = await self.log.between(self._at, upto, self._seq)
            passing = await self._passing(upto) if events else {}
            # Not all at once: between, those who were woken send, and are not taken for slow.
            for first in range(0, len(events), self._at_once):
                part = events[first : first + self._at_once]
                async with self._giving:
                    gifts = self._gifts(self._recent.add(part, passing), passing)
                    self._seq = part[-1].seq
                    await self._give(gifts)
            self._took = time.monotonic() - began
            if events:
                await asyncio.sleep(min(self._took / 16, _LONGEST_REST))
            if len(events) < PAGE:
                break
        self._recent.end()
        self._at, self._upto = upto, None
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()
        return True

    async def _passing(self, upto: Tick) -> dict[Question, set[int]]:
        """What passes each filter, of a page. Each has a time limit of its own."""
        asked = [
            await self._ask(question, upto, costly=False)
            for question in list(self.questions)
            if question not in self.costly
        ]
        asked += await asyncio.gather(*[self._ask(question, upto, costly=True) for question in self.costly])
        return {question: passed for question, passed in asked if passed is not None}

    async def _ask(self, question: Question, upto: Tick, *, costly: bool) -> tuple[Question, set[int] | None]:
        try:
            if not costly:
                return question, await self.log.passing(question, self._at, upto, self._seq, costly=False)
            async with self._costly_at_once:
                return question, await self.log.passing(question, self._at, upto, self._seq)
        except psycopg.errors.QueryCanceled:
            self.refuse(question)
            return question, None

    def _gifts(self, entries: Sequence[Entry], passing: dict[Question, set[int]]) -> list[_Gift]:
        """What is for whom. Whoever joins from now on has these events already."""
        # Those who ask for the same get the same: what is written is written once for all of them.
        wanted: dict[int, tuple[set[Reader], list[Entry]]] = {}
        for entry in entries:
            for readers in self._index.matching(entry.event, entry.document, passing):
                wanted.setdefault(id(readers), (readers, []))[1].append(entry)
        gifts: list[_Gift] = []
        for readers, wants in wanted.values():
            written: dict[bool, Message] = {}
            for reader in readers:
                message = written.get(reader.named)
                if message is None:
                    frames = b"".join([entry.frame(reader.named) for entry in wants])
                    message = {"type": "http.response.body", "body": frames, "more_body": True}
                    written[reader.named] = message
                gifts.append((reader, message, len(wants)))
            self._counts.sse_events += len(readers) * len(wants)
        self._counts.sse_bytes += sum(len(message["body"]) for _, message, _ in gifts)
        return gifts

    async def _give(self, gifts: Sequence[_Gift]) -> None:
        for first in range(0, len(gifts), _IN_ONE_GO):
            for reader, message, events in gifts[first : first + _IN_ONE_GO]:
                reader.offer(message, events)
            # Others have to go on meanwhile, not least whoever ticks.
            await asyncio.sleep(0)
