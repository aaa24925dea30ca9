"""Things that are looked up once for all who want the same at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from math import inf
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """What was found, by its key: the `most` that were asked for last, each good for `lasts` seconds.

    A look that failed is told to all who wait for it, and not remembered.
    """

    def __init__(self, most: int, lasts: float = inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._lasts = lasts
        self._clock = clock
        self._tasks: OrderedDict[Key, tuple[float, asyncio.Task[Value]]] = OrderedDict()

    async def get(self, key: Key, look: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        found = self._tasks.get(key)
        if found is None or self._is_over(*found):
            found = self._tasks[key] = (self._clock() + self._lasts, asyncio.create_task(look()))
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)
        # Who gives up waiting must not take it from the others.
        return await asyncio.shield(found[1])

    def forget(self, key: Key) -> None:
        self._tasks.pop(key, None)

    def _is_over(self, until: float, task: asyncio.Task[Value]) -> bool:
        if not task.done():
            return False
        return task.cancelled() or task.exception() is not None or self._clock() >= until
