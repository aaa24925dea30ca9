"""Threads for handlers that are not coroutines.

Not concurrent.futures: its threads hold up the end of the process, and one that hangs is a place lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any


class _Job:
    __slots__ = ("context", "done", "function", "loop")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()


class Threads:
    """Runs functions in daemon threads, made when there is none free and kept for the next."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free = 0
        self._count = 0

    async def run(self, function: Callable[[], Any]) -> Any:
        """What the function returns or raises. If cancelled, the thread runs on and its result is dropped.

        So whoever limits the time waits all the same: a function that was left to itself would run beside
        others of its key, and beside as many more as `concurrency` allows.
        """
        job = _Job(function)
        if self._free:
            self._free -= 1
        else:
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._jobs.put(job)
        result, error = await job.done
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Let the free threads end; the others end with their function."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, error = None, None
            try:
                result = job.context.run(job.function)
            except BaseException as raised:
                error = raised
            try:
                job.loop.call_soon_threadsafe(self._finish, job, result, error)
            except RuntimeError:
                return  # the loop is closed: no task waits any more
            del job, result, error

    def _finish(self, job: _Job, result: Any, error: BaseException | None) -> None:
        self._free += 1
        if not job.done.done():
            # Not as its exception: a future takes no StopIteration, and GeneratorExit would close the task.
            job.done.set_result((result, error))
