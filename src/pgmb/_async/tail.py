"""Tails: readers of a stream that leave no trace in the database."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from pgmb._async.calls import Pool
from pgmb._async.listener import AsyncListener, AsyncListening, AsyncSubscription
from pgmb._async.positions import AsyncPositions
from pgmb._core import cursor, statements, wire
from pgmb._core.concurrency import Pace
from pgmb._core.cursor import ReadCursor
from pgmb._core.lake import LakePages, Place, topics
from pgmb._core.patterns import compiled
from pgmb._core.statements import Filter
from pgmb.errors import ReaderBehind, StandbyError
from pgmb.types import Duration, Event, LakeAccess, Position, Source

_PAGE_EVENTS = 1000
_LOOK_EVERY_SECONDS = 0.03
"""Looks may tick, and more than a few dozen ticks per second serve no reader."""
_LISTENING_PAUSE_SECONDS = 10.0


class AsyncLooks(AsyncPositions):
    """Finds positions to read up to."""

    on_primary = True

    def __init__(self, pool: Pool, pages: LakePages | None = None) -> None:
        super().__init__(pool)
        self._pages = pages

    async def now(self, stream: str) -> Position:
        """What is committed by now; on a replica, what had been by the newest tick that came here."""
        try:
            return await self.position(stream)
        except StandbyError:
            self.on_primary = False
            return await self.newest_tick(stream)

    async def look(self, stream: str) -> Position:
        """The newest tick's position, after a tick now. Takes no transaction id where nothing happened."""
        try:
            tick, newest = (await self._rows(cursor.look(stream), None))[0]
        except StandbyError:
            self.on_primary = False
            return await self.newest_tick(stream)
        return Position.parse(newest) if tick is None else await self.position_of(stream, tick)

    async def page(
        self, stream: str, after: Position, upto: Position, after_seq: int, asked: Filter | None
    ) -> tuple[list[Event], int | None]:
        """A page's events, those that pass, and the seq with which it ended if there may be more."""
        if self._pages is not None:
            place = Place(stream, after, upto, after_seq)
            return await self._both(place, _PAGE_EVENTS, self._pages, asked, None)
        if asked is None:
            found = await self.between(stream, after, upto, after_seq, _PAGE_EVENTS, lake=False)
            return found, found[-1].seq if wire.may_go_on(found, _PAGE_EVENTS) else None
        statement = statements.between_filtered(stream, after, upto, after_seq, _PAGE_EVENTS, asked)
        rows = await self._timed_rows(statement, None)
        passing = wire.events((row for row in rows if row[2] is not None), Source(stream, 0))
        # Events that do not pass come without their payloads: how large the page was is not known.
        return passing, rows[-1][0] if rows else None

    async def check(self, stream: str, asked: Filter) -> None:
        """Refuse what is not a filter."""
        await self._timed_rows(statements.between_filtered(stream, None, None, 0, 0, asked), None)

    async def since(self, stream: str, at: datetime) -> ReadCursor:
        """Where to begin for events of that time and later."""
        found = await self.position_at(stream, at)
        if found.tick or self._pages is None:
            return ReadCursor(found)
        # Before the oldest tick: what is known of the times of segments leads there.
        before: int = await self._value(statements.seq_at(stream, at), None)
        return ReadCursor(found, await self.now(stream), before) if before else ReadCursor(found)

    async def newest_tick(self, stream: str) -> Position:
        """The position of the newest tick of any process."""
        return Position.parse(await self._value(cursor.newest_tick(stream), None))


class AsyncTail:
    """Events of a stream as they are committed, one after another. Made by `tail`.

    It begins with `async with`, or with the first event asked for. `position` is where it stands, after the
    last event that it gave: a tail from there goes on without gap or repetition. After an error, such as a
    lost connection, and after `max_wait` it can be iterated on.
    """

    def __init__(
        self,
        looks: AsyncLooks,
        listener: AsyncListener,
        stream: str,
        patterns: tuple[str, ...],
        after: Position | ReadCursor | str | None,
        follow: bool,
        max_wait: float | None,
        asked: Filter | None = None,
        since: datetime | None = None,
    ) -> None:
        self.stream = stream
        self.position = None if after is None else ReadCursor.of(after)
        """Where to go on, for the `after` of another tail. None before it has begun."""
        self.caught_up = False
        """Whether the last look found nothing more to read."""
        self._looks = looks
        self._listener = listener
        self._asked = asked
        self._since = since
        self._checked = asked is None
        self._matching = [compiled(pattern) for pattern in patterns]
        self._follow = follow
        self._max_wait = max_wait
        self._end: Position | None = None
        self._next = self.position
        self._page: deque[tuple[Event, ReadCursor]] = deque()
        self._subscription: AsyncSubscription | None = None
        self._pace = Pace(_LOOK_EVERY_SECONDS)
        self._look_at = 0.0
        self._woken = False
        self._closed = False

    async def start(self) -> ReadCursor:
        """Begin: what is committed from now on is seen. Nothing changes if it has begun."""
        if self._asked is not None and not self._checked:
            await self._looks.check(self.stream, self._asked)
            self._checked = True
        if self._follow and self._subscription is None and not self._closed:
            self._subscription = self._listener.subscribe(self.stream)
        if self._next is None:
            self.position = self._next = (
                ReadCursor(await self._looks.now(self.stream))
                if self._since is None
                else await self._looks.since(self.stream, self._since)
            )
        if not self._follow and self._end is None:
            self._end = await self._looks.now(self.stream)
        return self._next

    async def read(self) -> list[Event]:
        """The next events that match, of one page of the log, without waiting; moves on past that page."""
        if not self._page:
            await self._turn(await self.start())
        events = [event for event, _ in self._page]
        self._page.clear()
        self.position = self._next
        return events

    async def wait(self, max_wait: float | None = None) -> bool:
        """Pause until a look may be worth it, at most `max_wait` seconds. True if there was news."""
        await self.start()
        if self._subscription is None or self._closed:
            return False
        relying = self._subscription.healthy
        seconds = _LISTENING_PAUSE_SECONDS if relying else self._pace.pause()
        self._woken = await self._subscription.wait(seconds if max_wait is None else min(seconds, max_wait))
        return self._woken

    def wake(self) -> None:
        """Wake the waiting reader."""
        if self._subscription is not None:
            self._subscription.notify()

    def close(self) -> None:
        """End the tail, also while a caller waits for the next event."""
        self._closed = True
        if self._subscription is not None:
            self._subscription.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        asked_at = time.monotonic()
        while not self._page:
            if self._closed:
                raise StopAsyncIteration
            await self._turn(await self.start())
            if self._page:
                break
            self.position = self._next
            if not self.caught_up:
                continue
            if not self._follow:
                raise StopAsyncIteration
            left = None if self._max_wait is None else asked_at + self._max_wait - time.monotonic()
            if left is not None and left <= 0:
                raise StopAsyncIteration
            await self.wait(left)
        event, page = self._page.popleft()
        self.position = page.at(event.seq) if self._page else self._next
        return event

    async def _turn(self, at: ReadCursor) -> None:
        """Read a page of the batch under way, or of the one that begins now."""
        end = at.end or await self._later(at.start)
        self.caught_up = end is None
        if end is None:
            return
        try:
            found, more = await self._looks.page(self.stream, at.start, end, at.scanned_to, self._asked)
        except ReaderBehind:
            if self._looks.on_primary:
                raise
            # A replica: it will have replayed so far in a moment.
            self.caught_up = True
            return
        page = ReadCursor(at.start, end, at.scanned_to)
        self._next = ReadCursor(end) if more is None else page.at(more)
        self._page.extend((event, page) for event in found if self._matches(event))
        if found or more is not None:
            self._pace.found()

    async def _later(self, done: Position) -> Position | None:
        """A position after `done`, if something has happened since."""
        if self._end is not None:
            newest = self._end
        elif self._woken or not self._looks.on_primary:
            # Somebody has just ticked.
            newest = await self._looks.newest_tick(self.stream)
            self._woken = False
        elif time.monotonic() < self._look_at:
            return None
        else:
            newest = await self._looks.look(self.stream)
            self._look_at = time.monotonic() + _LOOK_EVERY_SECONDS
        if cursor.later(newest, done):
            return newest
        # Another tick, not a later one: a failover lost `done`, and the read raises; or this replica lags.
        return newest if newest.tick > 0 and newest != done else None

    def _matches(self, event: Event) -> bool:
        if self._since is not None and event.published_at < self._since:
            return False
        return not self._matching or any(pattern.fullmatch(event.topic) for pattern in self._matching)


class AsyncTailing(AsyncListening):
    def tail(
        self,
        *patterns: str,
        stream: str = "main",
        after: Position | ReadCursor | str | None = None,
        follow: bool = True,
        max_wait: Duration | None = None,
        listen: bool = True,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        params: Mapping[str, Any] | None = None,
        since: datetime | None = None,
        lake: LakeAccess | bool = True,
    ) -> AsyncTail:
        """The events of a stream whose topics match one of the patterns, by default all, one after another.

        From now on, after a position, or `since` a time: those that were published then or later; with both,
        those of them that lie after the position. With `follow` it waits for more, until none came for
        `max_wait`; without, it ends with what is committed by now. Nothing is stored in the database: keep
        `tail.position` to go on from there. What the log has dropped is read from the stream's lake, which
        needs `pgmb[lake]`; HistoryGone if it is not there either. `lake` says how to reach it; with False
        only the log is read. With `listen` the broker's listener wakes it; otherwise it looks every half
        second. `equals`, `filter` and `params` are those of `create_queue`.
        """
        waited = statements.interval(max_wait)
        statements.aware(since)
        pages = None if lake is False else LakePages(None if lake is True else lake, since, topics(patterns))
        return AsyncTail(
            AsyncLooks(self._pool, pages),
            self.listener() if listen and follow else AsyncListener(pooled=True),
            stream,
            patterns,
            after,
            follow,
            None if waited is None else waited.total_seconds(),
            None if equals is None and filter is None else Filter(equals, filter, params),
            since,
        )
