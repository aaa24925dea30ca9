"""Several worker processes under one parent, which restarts those that die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

logger = logging.getLogger("pgmb.app")

PARENT_PIPE = "PGMB_PARENT_PIPE"
"""The descriptor whose end of file tells a worker process that its parent is gone."""

WORKER = "PGMB_WORKER"
"""The number of a worker process, for its log."""

EXIT_WITHOUT_RESTART = 2
"""The exit code of a process that need not be started again."""

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
# Whoever ran for so long did not fail from the start.
_STABLE_AFTER_SECONDS = 10.0


async def supervise(command: Sequence[str], count: int, environment: Mapping[str, str]) -> int:
    """Keep `count` processes running until SIGTERM or SIGINT, which is passed on. Returns the exit code."""
    crew = _Crew(command, environment)
    loop = asyncio.get_running_loop()
    for signalled in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signalled, crew.end, signalled)
    async with asyncio.TaskGroup() as group:
        for place in range(1, count + 1):
            group.create_task(crew.keep(place))
    os.close(crew.writing)
    os.close(crew.reading)
    return crew.code


class _Crew:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.reading, self.writing = os.pipe()
        self.code = 0
        self._command = list(command)
        self._environment = {**environment, PARENT_PIPE: str(self.reading)}
        self._ending = asyncio.Event()
        self._children: set[asyncio.subprocess.Process] = set()

    def end(self, number: int) -> None:
        self._ending.set()
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    async def keep(self, place: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._ending.is_set():
            began = time.monotonic()
            code = await self._run(place)
            if self._ending.is_set():
                self.code = self.code or max(code, 0)
                return
            if code == EXIT_WITHOUT_RESTART:
                self.code = code
                self.end(signal.SIGTERM)
                return
            pause = _FIRST_PAUSE_SECONDS if time.monotonic() - began > _STABLE_AFTER_SECONDS else pause
            logger.warning("worker %s ended (%s); restarting in %.1f s", place, _manner(code), pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _run(self, place: int) -> int:
        # A session of its own: Ctrl-C in a terminal goes to the parent, who passes it on once.
        child = await asyncio.create_subprocess_exec(
            *self._command,
            env={**self._environment, WORKER: str(place)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self.reading],
        )
        self._children.add(child)
        try:
            if self._ending.is_set():
                child.terminate()
            return await child.wait()
        finally:
            self._children.discard(child)


def _manner(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
