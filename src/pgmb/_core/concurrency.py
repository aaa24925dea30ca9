"""Waiting, for tasks and threads alike: flags, conditions, background work, growing pauses.

The Async names are those that `make sync` turns into the others.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection, Connection
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgmb._core import loggers

logger = loggers.logger("pgmb")

_Result = TypeVar("_Result")


class AsyncFlag:
    """An event that can be waited for with a limit."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float | None) -> bool:
        """True as soon as it is set, False after that many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


class Flag:
    """An event that can be waited for with a limit."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float | None) -> bool:
        """True as soon as it is set, False after that many seconds."""
        return self._event.wait(seconds)


AsyncLock: TypeAlias = asyncio.Lock
Lock: TypeAlias = threading.Lock


class AsyncCondition(asyncio.Condition):
    """A condition that can be waited for with a limit, as `threading.Condition` can."""

    async def wait(self, timeout: float | None = None) -> bool:  # type: ignore[override]  # noqa: ASYNC109
        """True if notified, False after that many seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await super().wait()
        except TimeoutError:
            return False


Condition: TypeAlias = threading.Condition


class AsyncBackground:
    """Work beside the caller's: a task. If its event loop ends before `stop`, it does `at_end` first."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        at_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._running = self._stopping = False
        self._task = asyncio.create_task(self._run(work, at_end), name=name)

    async def _run(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        at_end: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._running = True
        try:
            await work()
        except asyncio.CancelledError:
            if at_end is not None and not self._stopping:
                await at_end()
            raise

    async def begin(self) -> None:
        """Wait until it runs. A task that is cancelled before its first step does nothing at its end."""
        while not self._running and not self._task.done():  # noqa: ASYNC110 - the very next step
            await asyncio.sleep(0)

    async def stop(self, reading: AsyncConnection[Any] | None) -> None:
        """Cancel it and wait for its end. `reading` is what a thread would have to be torn away from."""
        self._stopping = True
        self._task.cancel()
        await asyncio.wait([self._task])


class Background:
    """Work beside the caller's: a thread, which ends with the process."""

    def __init__(self, name: str, work: Callable[[], None], at_end: Callable[[], None] | None = None) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Nothing: a thread runs to its end."""

    def stop(self, reading: Connection[Any] | None) -> None:
        """Wait for its end, which the caller has asked for; end what it reads from, for it to notice."""
        if reading is not None:
            hang_up(reading)
        # It may be about to connect, which cannot be interrupted: it will find out afterwards.
        self._thread.join(2.0)


class AsyncEndingPool(AsyncConnectionPool[AsyncConnection[Any]]):
    """A pool whose tasks end with the event loop, also if nobody closed it."""

    @classmethod
    async def worker(cls, q: Any) -> None:
        # The task of the pool goes on if it is cancelled while it connects, and `asyncio.run` waits for it.
        await super().worker(cast("Any", _UntilCancelled(q)))

    def _start_workers(self) -> None:
        # So does the task that schedules attempts to connect, and before Python 3.12 also if it is cancelled
        # at the moment in which an attempt is scheduled.
        cast("Any", self)._sched._event = _EventUntilCancelled()  # noqa: SLF001 - no other way in
        super()._start_workers()


class _UntilCancelled:
    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def get(self) -> Any:
        _raise_cancellation()
        return await self._queue.get()


class _EventUntilCancelled(asyncio.Event):
    async def wait_timeout(self, timeout: float) -> bool:  # noqa: ASYNC109 - psycopg_pool's name
        _raise_cancellation()
        try:
            async with asyncio.timeout(timeout):
                return await self.wait()
        except TimeoutError:
            return False


def _raise_cancellation() -> None:
    if acancellations():
        raise asyncio.CancelledError


class EndingPool(ConnectionPool[Connection[Any]]):
    """A pool whose threads end with the process, also if nobody closed it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _pools[self] = os.getpid()


_pools: WeakKeyDictionary[EndingPool, int] = WeakKeyDictionary()
"""By the process that made them."""


# A pool that is collected as the interpreter ends waits 5 seconds for each of its threads, which do not run
# any more: on Python 3.13. Registered at import, so that handlers of users may still publish before.
@atexit.register
def _close_pools() -> None:
    for pool, process in list(_pools.items()):
        if process == os.getpid():
            pool.close(timeout=1)


class _Process:
    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def inherited(self) -> bool:
        """Whether a fork has copied it: sockets, threads and tasks are those of the parent process."""
        return self._process != os.getpid()


class AsyncHome(_Process):
    """The process and the event loop in which something was made, and which alone may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()

    @property
    def elsewhere(self) -> bool:
        """Whether the caller runs in another event loop."""
        try:
            return self.loop is not asyncio.get_running_loop()
        except RuntimeError:
            return True

    @property
    def ended(self) -> bool:
        """Whether the event loop was closed."""
        return self.loop is not None and self.loop.is_closed()


class Home(_Process):
    """The process in which something was made, and which alone may use it: from all of its threads."""

    loop = None
    elsewhere = ended = False


def acaller() -> object:
    """The task that runs."""
    return asyncio.current_task()


def caller() -> object:
    """The thread that runs."""
    return threading.current_thread()


def acancellations() -> int:
    """How often the task that runs was cancelled."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def cancellations() -> int:
    """Threads are not cancelled."""
    return 0


async def aoff_loop(work: Callable[[], _Result]) -> _Result:
    """Do work that blocks, in a thread."""
    return await asyncio.to_thread(work)


def off_loop(work: Callable[[], _Result]) -> _Result:
    """Do work that blocks: the caller may wait for it."""
    return work()


def hang_up(connection: AsyncConnection[Any] | Connection[Any]) -> None:
    """End a connection that another task or thread waits on, which then gets an error at once."""
    # Through a second descriptor: closing the connection itself is up to the one that uses it.
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


class _Limit:
    FIRST_SECONDS: Final = 3.0
    LONGEST_SECONDS: Final = 600.0

    def __init__(
        self, what: str, break_off: Callable[[object, float], float], seconds: float | None = None
    ) -> None:
        self.seconds = self.FIRST_SECONDS if seconds is None else seconds
        self._what = what
        self._break_off = break_off

    @contextlib.contextmanager
    def _enforced(self, caller: object, later: Callable[[float, Callable[[], None]], Any]) -> Generator[None]:
        began, expired = time.monotonic(), False
        timer: Any = None

        def expire() -> None:
            nonlocal expired, timer
            # The wait for a connection does not count.
            used = self._break_off(caller, self.seconds)
            if used >= self.seconds:
                logger.warning("%s: no answer for %.0f s, closing the connection", self._what, self.seconds)
                expired, used = True, 0.0
            # The next statement may get no answer either.
            timer = later(self.seconds - used, expire)

        timer = later(self.seconds, expire)
        try:
            yield
        finally:
            timer.cancel()
            took = 2 * (self.seconds if expired else time.monotonic() - began)
            self.seconds = min(max(self.FIRST_SECONDS, took), self.LONGEST_SECONDS)


class AsyncDeadline(_Limit):
    """A time limit for a task's statements, on servers and networks that stop answering without an error.

    It follows how long the statements take, so that a server that is only slow gets the time it needs.
    """

    def enforced(self) -> contextlib.AbstractContextManager[None]:
        """If the block uses a connection for longer, close it, so that its statement fails."""
        return self._enforced(acaller(), asyncio.get_running_loop().call_later)


class Deadline(_Limit):
    """A time limit for a thread's statements, on servers and networks that stop answering without an error.

    It follows how long the statements take, so that a server that is only slow gets the time it needs.
    """

    def enforced(self) -> contextlib.AbstractContextManager[None]:
        """If the block uses a connection for longer, close it, so that its statement fails."""
        return self._enforced(caller(), _timer)


def _timer(seconds: float, call: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


LONGEST_RETRY_SECONDS: Final = 2.0
"""Between attempts to reach a database that is away: work goes on within seconds of its return."""

FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.5
LISTENING_PAUSE_SECONDS: Final = 1.0
"""Between looks at a queue whose news a listener announces: retries that fall due are not announced."""


class Pace:
    """Short pauses after something was found, each `growth` times the one before until the longest."""

    def __init__(
        self,
        first: float = FIRST_PAUSE_SECONDS,
        longest: float = LONGEST_PAUSE_SECONDS,
        growth: float = 2.0,
    ) -> None:
        self._first = first
        self._longest = longest
        self._growth = growth
        self._next = first

    def found(self) -> None:
        """Something was there: look again soon."""
        self._next = self._first

    @property
    def at_rest(self) -> bool:
        """Whether nothing was found for so long that the pauses grow no more."""
        return self._next >= self._longest

    def pause(self) -> float:
        """How long to wait now, in seconds."""
        pause, self._next = self._next, min(self._next * self._growth, self._longest)
        return pause
