"""Things that are read once for all who want the same at about the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Shared(Generic[Key, Value]):
    """What does not change, by its key: the last `most` of them are kept, what failed is read again."""

    def __init__(self, gate: asyncio.Semaphore, most: int = 64) -> None:
        self._gate = gate
        self._most = most
        self._tasks: OrderedDict[Key, asyncio.Task[Value]] = OrderedDict()

    async def get(self, key: Key, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[key] = asyncio.create_task(self._read(read))
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)
        # Who gives up waiting must not take it from the others.
        return await asyncio.shield(task)

    async def _read(self, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        async with self._gate:
            return await read()
