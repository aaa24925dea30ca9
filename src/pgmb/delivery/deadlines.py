"""Time limits of many requests at once, at the cost of a dictionary's entry each.

A timer for each request costs as much as building and signing it; nobody needs it to the millisecond.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_LOOK_EVERY: Final = 0.05


class Deadlines:
    """Cancels tasks that take too long, at most a twentieth of a second late."""

    def __init__(self) -> None:
        self._until: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any], seconds: float) -> None:
        """From now on a task has so many seconds, until `end`."""
        loop = task.get_loop()
        self._until[task] = loop.time() + seconds
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_EVERY, self._look, loop)

    def end(self, task: asyncio.Task[Any]) -> None:
        self._until.pop(task, None)

    def ended(self, task: asyncio.Task[Any]) -> bool:
        """Whether a cancelled task was so for its deadline and nothing else: then it goes on."""
        if task not in self._late:
            return False
        self._late.discard(task)
        return task.uncancel() == 0

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task in [task for task, until in self._until.items() if until <= now]:
            del self._until[task]
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(_LOOK_EVERY, self._look, loop) if self._until else None
