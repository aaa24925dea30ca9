"""Reads a stream once for all its readers in this process, and what passes a filter once for the filter's."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout
from starlette.types import Message

from pgmb._async.listener import AsyncSubscription
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS, Pace
from pgmb._core.cursor import later
from pgmb.errors import ForeignPosition, HistoryGone, PgmbError, PositionLost
from pgmb.server.instrumentation import Counters
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import ResumeToken, position_frame, reset_frame
from pgmb.server.sse.history import PAGE, Batches, Recent, SieveFailed, StreamLog, Tick
from pgmb.server.sse.matching import Entry, ReaderIndex, Sieve, parts
from pgmb.server.tasks import cancel_and_wait
from pgmb.types import Position

logger = logging.getLogger("pgmb.server")

_LISTENING_PAUSE: Final = 10.0
_FIRST_RETRY_PAUSE: Final = 0.1
_SLOW_PAGE_SECONDS: Final = 0.05
_LONGEST_REST_SECONDS: Final = 0.1
"""Pause between reads under load: larger batches make each event cheaper."""
_QUERIES_PER_SECOND: Final = 100
"""Of all filters of a stream that keep up. The more there are, the more events each query is about."""
_READERS_PER_STEP: Final = 200
"""Readers served before other tasks run."""


class Tail(ABC):
    """Takes events in their order, remembers the newest, and hands each to the readers that it matches.

    A reader joins in the same step in which it gets the events after its token, and only if memory holds all
    of these. Nothing that a tail knows before it waits for the database is used after that.
    """

    def __init__(self, log: StreamLog, counts: Counters, at_once: int) -> None:
        self.log = log
        self.readers: set[Reader] = set()
        self.at: Tick
        """A tick up to which everything was taken."""
        self.token: ResumeToken
        """The token of a reader that has everything taken so far."""
        self.ended = False
        self.idle = 0
        """Heartbeats without readers, for who opened it."""
        self._counts = counts
        self._at_once = at_once
        self._index: ReaderIndex[Reader] = ReaderIndex()
        self._recent: Recent
        self._advanced = asyncio.Event()
        self._sending = asyncio.Lock()
        """Held while events have reached some readers and not others."""
        self._task: asyncio.Task[None] | None = None

    @property
    def earliest(self) -> ResumeToken:
        """The token before the oldest event that is kept."""
        at = self.at.position
        return Tick(0, None, Position(at.epoch, at.stream, 0, 0, "3:3:", 0, 3)).token()

    def join(self, reader: Reader, token: ResumeToken | None = None) -> list[Entry] | None:
        """Send a reader all events from now on. Returns those that it missed since the token.

        Returns None, without joining, if memory does not hold them. Drops the reader if the tail has ended.
        """
        if self.ended:
            reader.drop()
            return []
        missed = [] if token is None else self._recent.since(token, reader.interest)
        if missed is not None:
            self.readers.add(reader)
            self._index.add(reader, reader.interest)
        return missed

    def leave(self, reader: Reader) -> None:
        self.readers.discard(reader)
        self._index.remove(reader, reader.interest)

    def end(self) -> None:
        """Take nothing more, and disconnect all readers. They can reconnect and resume."""
        self.ended = True
        for reader in list(self.readers):
            reader.drop()
        self._notify()

    async def close(self) -> None:
        """End, and wait for the task."""
        self.end()
        if self._task is not None:
            await cancel_and_wait(self._task)

    async def heartbeat(self, part: int, parts: int) -> None:
        """Send a heartbeat with the current token to one slice of the readers."""
        async with self._sending:
            quiet = position_frame(str(self.token))
            for reader in list(self.readers):
                if reader.number % parts == part:
                    reader.heartbeat(quiet)

    async def _run(self) -> None:
        failures = 0
        try:
            while not self.ended:
                try:
                    await self._read()
                    failures = 0
                except (psycopg.Error, PoolTimeout, PgmbError, OSError) as error:
                    if isinstance(error, PoolClosed):
                        return
                    pause = min(_FIRST_RETRY_PAUSE * 2**failures, LONGEST_RETRY_SECONDS)
                    failures += 1
                    logger.warning("stream %s: %s; retrying in %.1f s", self.log.stream, error, pause)
                    await asyncio.sleep(pause)
        except Exception:
            logger.exception("reading stream %s failed", self.log.stream)
        finally:
            self.end()

    @abstractmethod
    async def _read(self) -> None:
        """Take the next events, or wait for them. After an error it is called again."""

    def _move(self, at: Tick, token: ResumeToken) -> None:
        self.at, self.token = at, token
        self._notify()

    def _notify(self) -> None:
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()

    async def advanced(self) -> None:
        """Wait until more was taken, or the tail ended."""
        await self._advanced.wait()

    async def _take(self, entries: Sequence[Entry], end: int) -> None:
        """Remember the next entries, below the number `end`, and send them."""
        async with self._sending:
            self._recent.add(entries, end)
            self._move(*self._recent.batches.place(end))
            outgoing = self._outgoing(entries)
            for number, (reader, message, events) in enumerate(outgoing, 1):
                reader.offer(message, events)
                if number % _READERS_PER_STEP == 0 or number == len(outgoing):
                    # Let other tasks run, the ticker among them.
                    await asyncio.sleep(0)

    def _outgoing(self, entries: Sequence[Entry]) -> list[tuple[Reader, Message, int]]:
        """Which message goes to which reader. A reader that joins later gets them from memory."""
        # Readers with equal interests get the same message, which is encoded once.
        wanted: dict[int, tuple[set[Reader], list[Entry]]] = {}
        for entry in entries:
            for readers in self._index.matching(entry.event, entry.document):
                wanted.setdefault(id(readers), (readers, []))[1].append(entry)
        outgoing: list[tuple[Reader, Message, int]] = []
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
        return outgoing


class StreamTail(Tail):
    """Reads a stream's log, from tick to tick."""

    def __init__(
        self, log: StreamLog, subscription: AsyncSubscription, counts: Counters, at_once: int = 100
    ) -> None:
        super().__init__(log, counts, at_once)
        self.filters: set[FilterTail] = set()
        self._subscription = subscription
        self._pace = Pace(0.03)
        self._woken = False
        self._seq = 0
        self._took = 0.0
        """Seconds that reading and sending the last page took."""

    async def start(self) -> None:
        """Start reading at the stream's newest tick. Raises StreamNotFound."""
        await self.log.tick()
        self._begin(await self.log.newest())
        self._task = asyncio.create_task(self._run(), name=f"pgmb tail {self.log.stream}")

    def end(self) -> None:
        super().end()
        self._subscription.close()

    @property
    def recent(self) -> Recent:
        """The newest events, for the tails of filters. Another one after a gap."""
        return self._recent

    def _begin(self, tick: Tick) -> None:
        self._recent = Recent(Batches(tick))
        self._move(tick, tick.token())

    async def _read(self) -> None:
        woken, self._woken = self._woken, False
        try:
            if not woken:
                await self.log.tick()
            if await self._read_batch():
                self._pace.found()
        except (HistoryGone, PositionLost, ForeignPosition) as error:
            logger.warning("stream %s: %s", self.log.stream, error)
            await self._start_over("history_gone" if isinstance(error, HistoryGone) else "lost")
            return
        relying = self._subscription.healthy
        self._woken = await self._subscription.wait(_LISTENING_PAUSE if relying else self._pace.pause())

    async def _start_over(self, reason: str) -> None:
        """Continue at the newest tick, and tell all readers that events are missing."""
        self._begin(await self.log.newest())
        frame = reset_frame(str(self.token), reason)
        for reader in list(self.readers):
            self._counts.sse_reset += 1
            reader.give(frame)
            reader.wake()

    async def _read_batch(self) -> bool:
        """Read up to the newest tick. After an error, the batch that was begun is continued."""
        batches = self._recent.batches
        if batches.current is None:
            if self._took > _SLOW_PAGE_SECONDS:
                # The ticker's last tick is old by now, and the next read is equally far away.
                await self.log.tick()
            newest = await self.log.newest()
            is_epoch = newest.position.epoch == self.at.position.epoch
            if not is_epoch or newest.position.stream != self.at.position.stream:
                await self._start_over("lost" if is_epoch else "epoch")
                return True
            if not later(newest.position, self.at.position):
                if newest.number > 0 and newest.position != self.at.position:
                    # A failover lost this tick, and the read raises; or this standby lags behind.
                    await self.log.between(self.at, newest, 0)
                return False
            batches.begin(newest)
            self._seq = 0
        batch = batches.current
        assert batch is not None  # noqa: S101
        while True:
            began = time.monotonic()
            page = await self.log.between(batch.after, batch.upto, self._seq)
            for part in parts(page.entries, self._at_once):
                batches.add(part)
                self._seq = part[-1].event.seq
                await self._take(part, batches.end)
            self._took = time.monotonic() - began
            if page.entries:
                await asyncio.sleep(min(self._took / 16, _LONGEST_REST_SECONDS))
            if page.is_last:
                break
        batches.complete()
        self._move(*batches.place(batches.end))
        return True


class FilterTail(Tail):
    """Takes the events of a stream's tail that pass a sieve: one query for each page.

    It follows at its own pace and shares the events. If it falls so far behind that memory does not hold the
    next ones, it ends: readers that resume read the log.
    """

    def __init__(
        self,
        stream: StreamTail,
        sieve: Sieve,
        counts: Counters,
        at_once: int = 100,
        *,
        costly: bool = False,
        failed: Callable[[FilterTail, Sequence[Reader]], None],
    ) -> None:
        """`failed`: is told if the sieve takes too long or raises, and for which readers."""
        super().__init__(stream.log, counts, at_once)
        self.sieve = sieve
        self.costly = costly
        self.client_id: Hashable = None
        """The client that it was opened for."""
        self._stream = stream
        stream.filters.add(self)
        self._failed = failed
        self._recent = Recent(stream.recent.batches)
        self._move(*stream.recent.batches.place(self._recent.end))
        self._task = asyncio.create_task(self._run(), name=f"pgmb filter {self.log.stream}")

    def end(self) -> None:
        super().end()
        self._stream.filters.discard(self)

    def fail(self, error: SieveFailed, *readers: Reader) -> None:
        """End because of the sieve, for the readers that joined and these."""
        logger.warning("stream %s: a filter failed: %s: %.200s", self.log.stream, error, self.sieve)
        self._failed(self, [*self.readers, *readers])
        for reader in readers:
            reader.drop()
        self.end()

    async def _read(self) -> None:
        recent, stream = self._recent, self._stream.recent
        if not self._holds_next(stream):
            self.end()
            return
        entries = stream.after(recent.end, PAGE)
        if not entries:
            self._move(*recent.batches.place(recent.end))
            await self._stream.advanced()
            return
        try:
            passing = await self.log.passing(self.sieve, entries, costly=self.costly)
        except HistoryGone:
            self.end()
            return
        except SieveFailed as error:
            self.fail(error)
            return
        passed = [entry for entry in entries if entry.event.seq in passing]
        for part in parts(passed, self._at_once):
            if not self._holds_next(stream):
                return
            await self._take(part, part[-1].number + 1)
        if recent.end <= entries[-1].number and self._holds_next(stream):
            await self._take([], entries[-1].number + 1)
        if len(entries) < PAGE:
            await asyncio.sleep(len(self._stream.filters) / _QUERIES_PER_SECOND)

    def _holds_next(self, stream: Recent) -> bool:
        """Whether the stream's tail remembers the events from here on."""
        known = stream is self._stream.recent and self._recent.end >= stream.batches.first
        return known and not self._stream.ended
