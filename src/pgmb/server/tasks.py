"""Background tasks: ending them, and sharing their results between requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from math import inf
from typing import Any, Final, Generic, TypeVar

_CANCEL_AGAIN_AFTER: Final = 0.2


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task, again if necessary, and wait for its end. Its error is ignored.

    One cancellation can be lost: `asyncio.wait_for` of Python 3.11 returns a result that arrives at the same
    time, and a statement that is cancelled with the task may raise an error that the task handles.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_AFTER)
    if not task.cancelled():
        task.exception()


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SharedCache(Generic[Key, Value]):
    """Caches results by key. Concurrent requests for a key share one lookup.

    It keeps the `most` recently used results, each for `lasts` seconds. Errors reach everyone who waits for
    the lookup and are not cached.
    """

    def __init__(self, most: int, lasts: float = inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._lasts = lasts
        self._clock = clock
        self._tasks: OrderedDict[Key, tuple[float, asyncio.Task[Value]]] = OrderedDict()

    async def get(self, key: Key, lookup: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        found = self._tasks.get(key)
        if found is None or self._is_expired(*found):
            found = self._tasks[key] = (self._clock() + self._lasts, asyncio.create_task(lookup()))
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)
        # A cancelled caller must not cancel the lookup of the others.
        return await asyncio.shield(found[1])

    def latest(self, key: Key) -> Value | None:
        """The result of the last lookup, also if it has expired. None if there is none, or it failed."""
        task = self._tasks.get(key, (0.0, None))[1]
        done = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and done else None

    def forget(self, key: Key) -> None:
        self._tasks.pop(key, None)

    def _is_expired(self, until: float, task: asyncio.Task[Value]) -> bool:
        if not task.done():
            return False
        return task.cancelled() or task.exception() is not None or self._clock() >= until


Result = TypeVar("Result")


class SharedResult(Generic[Result]):
    """One result for all callers, kept for `lasts` seconds. At most one lookup runs at a time."""

    def __init__(
        self,
        lookup: Callable[[], Awaitable[Result]],
        lasts: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup
        self._lasts = lasts
        self._clock = clock
        self._task: asyncio.Task[Result] | None = None
        self._until = 0.0

    async def get(self, within: float) -> Result:
        """The result. Raises TimeoutError after `within` seconds; the lookup continues."""
        task = self._task
        if task is None or (task.done() and self._clock() >= self._until):
            task = self._task = asyncio.create_task(self._run())
            task.add_done_callback(_retrieve_error)
        await asyncio.wait({task}, timeout=within)
        if not task.done():
            raise TimeoutError
        return task.result()

    async def close(self) -> None:
        """Cancel a running lookup."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)

    async def _run(self) -> Result:
        try:
            return await self._lookup()
        finally:
            self._until = self._clock() + self._lasts


def _retrieve_error(task: asyncio.Task[object]) -> None:
    """Mark the error as retrieved, or asyncio would log it when no caller waits any more."""
    if not task.cancelled():
        task.exception()
