"""One look for all who ask at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pgmb.server.tasks import end

Seen = TypeVar("Seen")


class Shared(Generic[Seen]):
    """What was seen is good for `lasts` seconds; there is never more than one look under way."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Seen]],
        lasts: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._lasts = lasts
        self._clock = clock
        self._task: asyncio.Task[Seen] | None = None
        self._until = 0.0

    async def get(self, within: float) -> Seen:
        """What is to be seen. TimeoutError if that takes too long; the look itself goes on."""
        task = self._task
        if task is None or (task.done() and self._clock() >= self._until):
            task = self._task = asyncio.create_task(self._seen())
            task.add_done_callback(_heard)
        await asyncio.wait({task}, timeout=within)
        if not task.done():
            raise TimeoutError
        return task.result()

    async def close(self) -> None:
        """End the look that is under way."""
        task, self._task = self._task, None
        if task is not None:
            await end(task)

    async def _seen(self) -> Seen:
        try:
            return await self._look()
        finally:
            self._until = self._clock() + self._lasts


def _heard(task: asyncio.Task[object]) -> None:
    """What went wrong is told to whoever still waits; if nobody does, that is no news."""
    if not task.cancelled():
        task.exception()
