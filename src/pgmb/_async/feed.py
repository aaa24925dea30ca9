"""Feeds: fire-and-forget events of a group. One tail per group reads for all feeds of a process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self
from uuid import UUID

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout

from pgmb._async.calls import Pool
from pgmb._async.listener import AsyncListener
from pgmb._async.tail import AsyncLooks, AsyncTail
from pgmb._core import groups, loggers
from pgmb._core.concurrency import AsyncBackground, AsyncFlag, AsyncLock, Pace
from pgmb._core.groups import Buffer, SubscriptionSpec
from pgmb._core.statements import Filter, Statement
from pgmb._core.wire import Row
from pgmb.errors import PermissionDenied, PgmbError, SubscriptionPaused, TimeoutRequired, WrongServer
from pgmb.types import Event, Position, Source

logger = loggers.logger("pgmb.group")

_PAGE_EVENTS = 1000
_DATABASE_ERRORS = (psycopg.OperationalError, PoolTimeout, WrongServer, OSError)
"""What passes: a restart of the server, a lost connection."""


class AsyncFeed:
    """Events that match, in batches, while the caller iterates. Made by `group.listen`.

    It begins with `async with`, or with the first batch requested, and ends with it: after `break`, an error
    or `close` nothing is left in the database. Of events that are not taken in time the oldest are dropped:
    `dropped` says how many.
    """

    def __init__(
        self,
        source: AsyncFeeding,
        spec: SubscriptionSpec,
        expires_after: float,
        max: int,
        max_pending: int,
        max_wait: float | None,
    ) -> None:
        self.spec = spec
        self.expires_after = expires_after
        self.error: BaseException | None = None
        """Why it ended, if not by itself."""
        self.buffer = Buffer(max_pending)
        self.news = AsyncFlag()
        self._source = source
        self._max = max
        self._max_wait = max_wait
        self._started = False
        self.closed = False

    @property
    def dropped(self) -> int:
        """How many events were dropped, because more came than were taken."""
        return self.buffer.dropped

    async def start(self) -> None:
        """Begin: what is committed from now on is heard. Nothing changes if it has begun."""
        if not self._started and not self.closed:
            self._started = True
            await self._source.add(self)

    async def close(self) -> None:
        """End the feed, also while a caller waits for the next batch."""
        if not self.closed:
            self.closed = True
            self.news.set()
            await self._source.remove(self)

    def fail(self, error: BaseException) -> None:
        """Raise this error in the caller, after the events that already arrived."""
        self.error = error
        self.news.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # A generator: leaving its loop ends it, which an object with __anext__ would not learn of.
    async def __aiter__(self) -> AsyncGenerator[list[Event]]:
        try:
            await self.start()
            while not self.closed:
                self.news.clear()
                if batch := self.buffer.take(self._max):
                    yield batch
                elif self.error is not None:
                    raise self.error
                elif not await self.news.wait(self._max_wait):
                    return
        finally:
            await self.close()


class _AsyncGroupLooks(AsyncLooks):
    """Reads a page of the log as a group does, every event with the subscriptions that it matches."""

    def __init__(self, pool: Pool, group: str) -> None:
        super().__init__(pool)
        self._group = group
        self._timed = False
        self._may_look = True

    async def page(
        self, stream: str, after: Position, upto: Position, after_seq: int, asked: Filter | None
    ) -> tuple[list[Event], int | None]:
        statement = groups.between_group(self._group, stream, after, upto, after_seq, _PAGE_EVENTS)
        rows = await self._group_rows(statement)
        # The last one always comes: it says how far the page went.
        found = groups.events((row for row in rows if row[8]), Source(stream, 0))
        return found, rows[-1][0] if rows else None

    async def _group_rows(self, statement: Statement) -> list[Row]:
        if not self._timed:
            try:
                return await self._rows(statement, None)
            except TimeoutRequired:
                self._timed = True
        return await self._timed_rows(statement, None)

    async def subscribe(self, spec: SubscriptionSpec, expires_after: float, stream: str) -> UUID:
        statement = spec.subscribe(self._group, expires_after, stream)
        return UUID(bytes=await self._value(statement, None))

    async def unsubscribe(self, id: UUID) -> None:
        await self._value(groups.unsubscribe(id), None)

    async def keep(self, ids: list[UUID]) -> set[UUID]:
        return {UUID(bytes=row[0]) for row in await self._rows(groups.keep_subscriptions(ids), None)}

    async def paused(self, ids: list[UUID]) -> dict[UUID, str]:
        """Those that raised, with what they said: as far as this role may see it."""
        if not self._may_look:
            return {}
        try:
            rows = await self._rows(groups.paused(ids), None)
        except PermissionDenied:
            self._may_look = False
            return {}
        return {UUID(bytes=id): reason for id, reason in rows}


class AsyncFeeding:
    """The feeds of a group in this process, and the tail that reads for them.

    Their subscriptions belong to a group of this process alone, so that no other process ends them.
    """

    def __init__(self, pool: Pool, listener: AsyncListener, group: str, stream: str) -> None:
        self.stream = stream
        self._group = group
        self._listener = listener
        self._looks = _AsyncGroupLooks(pool, groups.private_name(group))
        self._feeds: dict[UUID, list[AsyncFeed]] = {}
        self._changing = AsyncLock()
        # For what the background sees of the feeds, where that is a thread.
        self._lock = threading.Lock()
        self._tail: AsyncTail | None = None
        self._background: AsyncBackground | None = None
        self._stopping = AsyncFlag()
        self._kept_at = 0.0

    async def add(self, feed: AsyncFeed) -> None:
        """Give a feed what is committed from now on."""
        async with self._changing:
            if feed.closed:
                return
            tail = self._tail
            if tail is None:
                tail = AsyncTail(self._looks, self._listener, self.stream, (), None, True, None)
                # The position first: what is committed while this subscribes is read as well.
                await tail.start()
            id = await self._looks.subscribe(feed.spec, feed.expires_after, self.stream)
            with self._lock:
                self._feeds.setdefault(id, []).append(feed)
            if self._tail is None:
                self._tail = tail
                self._stopping.clear()
                self._kept_at = time.monotonic()
                self._background = AsyncBackground("pgmb group", self._run)
            else:
                # It may be waiting for longer than this one can.
                tail.wake()

    async def remove(self, feed: AsyncFeed) -> None:
        async with self._changing:
            with self._lock:
                ended = [id for id, feeds in self._feeds.items() if feeds == [feed]]
                for feeds in self._feeds.values():
                    if feed in feeds:
                        feeds.remove(feed)
                for id in ended:
                    del self._feeds[id]
                last = not self._feeds
            if last:
                await self._stop()
            for id in ended:
                # Whatever hinders this, it expires.
                with contextlib.suppress(psycopg.Error, PgmbError, PoolTimeout, PoolClosed, OSError):
                    await self._looks.unsubscribe(id)

    async def close(self) -> None:
        """End all feeds."""
        with self._lock:
            feeds = [feed for feeds in self._feeds.values() for feed in feeds]
        for feed in feeds:
            await feed.close()

    async def _stop(self) -> None:
        tail, self._tail = self._tail, None
        background, self._background = self._background, None
        self._stopping.set()
        if tail is not None:
            tail.close()
        if background is not None:
            await background.stop(None)

    # -- in the background -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        tail = self._tail
        pace = Pace(0.1, 10.0)
        while tail is not None and tail is self._tail:
            try:
                pause = await self._keep()
                self._hand_out(await tail.read())
                pace.found()
                if tail.caught_up:
                    await tail.wait(pause)
            except _DATABASE_ERRORS as error:
                if isinstance(error, PoolClosed):
                    self._fail(error)
                    return
                seconds = pace.pause()
                logger.warning(
                    "group %s: cannot read: %s; retrying in %.1f s", self._group, str(error).strip(), seconds
                )
                await self._stopping.wait(seconds)
            except Exception as error:
                self._fail(error)
                return

    async def _keep(self) -> float:
        """Keep the subscriptions, if it is time to, and subscribe again where they expired.

        Returns in how many seconds it will be time again.
        """
        with self._lock:
            every = [feed for feeds in self._feeds.values() for feed in feeds]
            ids = list(self._feeds)
        shortest = min((feed.expires_after for feed in every), default=60.0)
        left = self._kept_at + shortest / 4 - time.monotonic()
        if left > 0:
            return left
        present = await self._looks.keep(ids)
        for id in ids:
            if id not in present:
                await self._renew(id)
        for id, reason in (await self._looks.paused(ids)).items():
            self._fail_those_of(id, reason)
        self._kept_at = time.monotonic()
        return shortest / 4

    async def _renew(self, id: UUID) -> None:
        with self._lock:
            feeds = list(self._feeds.get(id, ()))
        if not feeds:
            return
        logger.warning("group %s: subscription %s had expired; subscribing again", self._group, id)
        renewed = await self._looks.subscribe(feeds[0].spec, feeds[0].expires_after, self.stream)
        with self._lock:
            self._feeds.setdefault(renewed, []).extend(self._feeds.pop(id, ()))

    def _hand_out(self, events: list[Event]) -> None:
        with self._lock:
            woken: set[AsyncFeed] = set()
            for event in events:
                for id in event.subscriptions:
                    for feed in self._feeds.get(id, ()):
                        feed.buffer.put(event)
                        woken.add(feed)
        for feed in woken:
            feed.news.set()

    def _fail_those_of(self, id: UUID, reason: str) -> None:
        with self._lock:
            feeds = list(self._feeds.get(id, ()))
        for feed in feeds:
            feed.fail(SubscriptionPaused(f"the subscription is paused: {reason}"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            feeds = [feed for feeds in self._feeds.values() for feed in feeds]
        for feed in feeds:
            feed.fail(error)
