"""Wake-ups: one connection that listens for ticks, on behalf of all that wait in this process."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self, cast
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from pgmb._async.calls import AsyncCalls
from pgmb._core import chance, loggers
from pgmb._core.concurrency import (
    LONGEST_RETRY_SECONDS,
    AsyncBackground,
    AsyncDeadline,
    AsyncFlag,
    Pace,
    hang_up,
)
from pgmb._core.connecting import aconnect
from pgmb._core.patterns import TopicHints

logger = loggers.logger("pgmb.listener")

_FIRST_PAUSE_SECONDS = 0.1
_FIRST_TICK_PAUSE_SECONDS = 0.03
_TICK_RETRY_SECONDS = 60.0
_TICKER_SILENT_SECONDS = 35.0
"""A ticker sends a notification at least every ten seconds."""
# A stream that was dropped has no log. Some roles that may tick may not read pgmb.stream.
_TICK = (
    "select pgmb.tick(name) from unnest(%s::text[]) name"
    " where to_regclass(format('pgmb.%%I', 'log_' || name)) is not null"
)


class AsyncSubscription:
    """Something that waits for news of a stream. Made by `AsyncListener.subscribe`."""

    def __init__(self, listener: AsyncListener, stream: str, topics: TopicHints | None) -> None:
        self._listener = listener
        self._flag = AsyncFlag()
        self.stream = stream
        self.topics = topics

    @property
    def healthy(self) -> bool:
        """Whether `wait` alone suffices: what is committed to the stream is announced within a second."""
        return self._listener.healthy and self._listener.ticking

    @property
    def announced(self) -> bool:
        """Whether another process ticks the stream, as far as was heard lately."""
        heard_at = self._listener.announced.get(self.stream, float("-inf"))
        return self._listener.healthy and time.monotonic() - heard_at < _TICKER_SILENT_SECONDS

    async def wait(self, max_wait: float | None = None) -> bool:
        """True if there was news since the last wait, or comes within `max_wait` seconds.

        Also true when the connection was lost or found again: something may have gone by unheard. It means
        "look now", not "there is something": many waiters are woken for one event.
        """
        if not await self._flag.wait(max_wait):
            return False
        self._flag.clear()
        return True

    def notify(self) -> None:
        """Wake the waiter, as news would."""
        self._flag.set()

    def close(self) -> None:
        """Hear no more. Whoever waits is woken."""
        self._listener.forget(self)
        self._flag.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncListener:
    """Listens on one connection of its own, which it opens with the first subscription.

    It hears the ticks of every process. A stream of which nothing was heard for a while it ticks
    itself, where its role may: soon again while there is traffic, `tick_every` seconds apart at rest, when it
    is its only statement. So there is news with no Ticker running too, only later. A lost connection is made
    anew, in growing intervals. Behind a pooler, which shares its connections out by transaction, it does not
    listen, and `pooled` says so.
    """

    def __init__(
        self, dsn: str = "", *, tick_every: float | None = 1.0, pooled: bool = False, **connection: Any
    ) -> None:
        self.dsn = dsn
        self.pooled = pooled
        self.healthy = False
        """Whether it is listening."""
        self.ticking = False
        """Whether its own ticks went well, so that all news is heard even if no other process ticks."""
        self.announced: dict[str, float] = {}
        """When another process was heard to tick a stream."""
        self._tick_every = tick_every
        self._options: dict[str, Any] = {
            **connection,
            "fallback_application_name": "pgmb listener",
        }
        # Weak: to let go of a subscription is to close it. Locked: the listener may be a thread of its own.
        self._streams: dict[str, WeakSet[AsyncSubscription]] = {}
        self._lock = threading.Lock()
        self._heard: set[str] = set()
        self._background: AsyncBackground | None = None
        self._connection: AsyncConnection[Any] | None = None
        self._settled = AsyncFlag()
        self._closing = AsyncFlag()
        self._tick_again_at = 0.0
        self._deadline = AsyncDeadline("listener", self._hang_up)

    def subscribe(self, stream: str = "main", topics: TopicHints | None = None) -> AsyncSubscription:
        """Hear of a stream from now on; with `topics`, only of ticks whose events may match them."""
        subscription = AsyncSubscription(self, stream, topics)
        with self._lock:
            self._streams.setdefault(stream, WeakSet()).add(subscription)
            if self._background is None and not self.pooled and not self._closing.is_set():
                self._background = AsyncBackground("pgmb listener", self._run)
        return subscription

    def forget(self, subscription: AsyncSubscription) -> None:
        """What `AsyncSubscription.close` calls."""
        with self._lock:
            self._streams.get(subscription.stream, WeakSet()).discard(subscription)

    async def start(self, max_wait: float | None = 10.0) -> bool:
        """Connect now instead of with the first subscription. True once it listens, False if it cannot."""
        self.subscribe().close()
        if not self.pooled:
            await self._settled.wait(max_wait)
        return self.healthy

    async def close(self) -> None:
        """End the connection. Whoever waits is woken, and the listener stays closed."""
        self._closing.set()
        background, self._background = self._background, None
        if background is not None:
            await background.stop(self._connection)
        self._wake_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set() and not self.pooled:
            try:
                async with await aconnect(self.dsn, **self._options) as connection:
                    self._connection = connection
                    if await _is_pooled(connection):
                        self.pooled = True
                        logger.info(
                            "connected through a pooler, which forwards no notifications: polling instead"
                        )
                        break
                    await connection.execute("listen pgmb")
                    pause = _FIRST_PAUSE_SECONDS
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                if not self._closing.is_set():
                    logger.warning("not listening: %s; retrying in %.1f s", _first_line(error), pause)
            finally:
                self.healthy = self.ticking = False
                self.announced.clear()
                self._connection = None
                self._settled.set()
            # Whoever relied on the wake-ups has to look for itself now.
            self._wake_all()
            await self._closing.wait(pause * chance.between(0.5, 1))
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)
        self._settled.set()
        self._wake_all()

    async def _listen(self, connection: AsyncConnection[Any]) -> None:
        self.healthy = True
        self._tick_again_at = 0.0
        self._heard.clear()
        await self._tick(connection)
        self._settled.set()
        # Something may have been missed before.
        self._wake_all()
        own = connection.info.backend_pid
        pace = None if self._tick_every is None else Pace(_FIRST_TICK_PAUSE_SECONDS, self._tick_every)
        while not self._closing.is_set():
            self._heard.clear()
            async for heard in connection.notifies(timeout=None if pace is None else pace.pause()):
                stream, _, hints = heard.payload.partition(" ")
                if heard.pid != own:
                    self._heard.add(stream)
                    self.announced[stream] = time.monotonic()
                self._wake(stream, hints)
            if await self._tick(connection) and pace is not None:
                pace.found()

    async def _tick(self, connection: AsyncConnection[Any]) -> bool:
        """Tick streams with waiters that no other process ticked lately. True if there was news."""
        silent = [stream for stream in self._waited_for() if stream not in self._heard]
        if self._tick_every is None or not silent or time.monotonic() < self._tick_again_at:
            return False
        try:
            cursor = connection.cursor(row_factory=tuple_row)
            with self._deadline.enforced():
                ticks = await (await cursor.execute(_TICK, [silent])).fetchall()
            self.ticking = True
            return any(tick is not None for (tick,) in ticks)
        except psycopg.Error as error:
            if connection.closed:
                raise
            # Not allowed, most likely: then others tick, or those who wait look for themselves.
            logger.info("cannot tick: %s", _first_line(error))
            self.ticking = False
            self._tick_again_at = time.monotonic() + _TICK_RETRY_SECONDS
            self._wake_all()
            return False

    def _hang_up(self, _: object, used_for: float) -> float:
        connection = self._connection
        if connection is None:
            return 0.0
        hang_up(connection)
        return used_for

    def _waited_for(self) -> list[str]:
        with self._lock:
            self._streams = {stream: waiting for stream, waiting in self._streams.items() if waiting}
            return list(self._streams)

    def _wake(self, stream: str, hints: str = "") -> None:
        with self._lock:
            waiting = list(self._streams.get(stream, ()))
        for subscription in waiting:
            if not hints or subscription.topics is None or subscription.topics.may_match(hints):
                subscription.notify()

    def _wake_all(self) -> None:
        for stream in self._waited_for():
            self._wake(stream)


class AsyncListening(AsyncCalls):
    _listener: AsyncListener | None = None

    def listener(self, dsn: str | None = None, *, tick_every: float | None = 1.0) -> AsyncListener:
        """The listener that everything of this broker shares. It closes with the broker.

        The first call may name a connection string of its own: past a pooler, directly to the server. Whoever
        looks for itself now and then need not have it tick: None.
        """
        self._pool.refuse_elsewhere()
        if self._listener is None:
            options = cast("dict[str, Any]", self._pool.kwargs) if dsn is None else {}
            # Statements are not prepared where a pooler was found, or announced.
            pooled = "prepare_threshold" in options and options["prepare_threshold"] is None
            address = cast("str", self._pool.conninfo) if dsn is None else dsn
            self._listener = AsyncListener(address, tick_every=tick_every, pooled=pooled, **options)
        return self._listener


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


async def _is_pooled(connection: AsyncConnection[Any]) -> bool:
    async with connection.cursor(row_factory=tuple_row) as cursor:
        found = await (await cursor.execute("select pg_backend_pid()")).fetchone()
    return found != (connection.info.backend_pid,)
