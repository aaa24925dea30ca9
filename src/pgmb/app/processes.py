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
from pathlib import Path

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

_LOOK_EVERY_SECONDS = 0.5
_SETTLED_SECONDS = 0.1
_PASSED_OVER = {"node_modules", "site-packages"}


async def supervise(
    command: Sequence[str], count: int, environment: Mapping[str, str], *, reload: Path | None = None
) -> int:
    """Keep `count` processes running until SIGTERM or SIGINT, which is passed on. Returns the exit code.

    `reload`: start them again whenever a Python file in this folder changes. A process that cannot be started
    waits for the next change.
    """
    crew = _Crew(command, environment, waits_for_change=reload is not None)
    loop = asyncio.get_running_loop()
    for signalled in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signalled, crew.end, signalled)
    async with asyncio.TaskGroup() as group:
        if reload is not None:
            group.create_task(crew.reload(reload, await asyncio.to_thread(python_files, reload)))
        for place in range(1, count + 1):
            group.create_task(crew.keep(place))
    os.close(crew.writing)
    os.close(crew.reading)
    return crew.code


class _Crew:
    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], *, waits_for_change: bool
    ) -> None:
        self.reading, self.writing = os.pipe()
        self.code = 0
        self._command = list(command)
        self._environment = {**environment, PARENT_PIPE: str(self.reading)}
        self._waits_for_change = waits_for_change
        self._ended = asyncio.Event()
        self._news = asyncio.Event()
        """Set when the files changed, and at the end. The next change has an event of its own."""
        self._children: set[asyncio.subprocess.Process] = set()
        self._replaced: set[asyncio.subprocess.Process] = set()
        """Those that were told to end because the files changed. A second signal would kill them."""

    def end(self, number: int) -> None:
        self._ended.set()
        self._news.set()
        for child in self._children:
            _signal(child, number)

    async def reload(self, folder: Path, files: Mapping[str, int]) -> None:
        pause = _LOOK_EVERY_SECONDS
        while not await _within(self._news, pause):
            began = time.monotonic()
            found = await asyncio.to_thread(python_files, folder)
            pause = max(_LOOK_EVERY_SECONDS, (time.monotonic() - began) * 10)
            if found == files:
                continue
            # An editor or a checkout may not be done: until a look finds nothing new.
            while not await _within(self._news, _SETTLED_SECONDS):
                again = await asyncio.to_thread(python_files, folder)
                if again == found:
                    break
                found = again
            if self._ended.is_set():
                return
            changed = sorted(name for name in files.keys() | found if files.get(name) != found.get(name))
            files = found
            logger.info("reloading: %s changed", ", ".join(changed[:3]) + (", …" if changed[3:] else ""))
            news, self._news = self._news, asyncio.Event()
            news.set()
            for child in self._children - self._replaced:
                self._replaced.add(child)
                _signal(child, signal.SIGTERM)

    async def keep(self, place: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._ended.is_set():
            # Of before the start: what changes while the process starts is not in it.
            news = self._news
            began = time.monotonic()
            code = await self._run(place, news)
            if self._ended.is_set():
                self.code = self.code or max(code, 0)
                return
            if news.is_set():
                pause = _FIRST_PAUSE_SECONDS
            elif code != EXIT_WITHOUT_RESTART:
                pause = _FIRST_PAUSE_SECONDS if time.monotonic() - began > _STABLE_AFTER_SECONDS else pause
                logger.warning("worker %s ended (%s); restarting in %.1f s", place, _manner(code), pause)
                await _within(news, pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            elif self._waits_for_change:
                logger.warning("worker %s did not start; waiting for a file to change", place)
                await news.wait()
            else:
                self.code = code
                self.end(signal.SIGTERM)

    async def _run(self, place: int, news: asyncio.Event) -> int:
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
            if news.is_set():
                child.terminate()
            return await child.wait()
        finally:
            self._children.discard(child)
            self._replaced.discard(child)


def python_files(folder: Path) -> dict[str, int]:
    """The Python files of a folder, without installed packages, and when each was changed."""
    found: dict[str, int] = {}
    for place, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [
            name for name in folders if not name.startswith((".", "__")) and name not in _PASSED_OVER
        ]
        for name in files:
            if name.endswith(".py"):
                path = Path(place, name)
                # It may be gone by now.
                with contextlib.suppress(OSError):
                    found[str(path.relative_to(folder))] = path.stat().st_mtime_ns
    return found


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long. Whether it is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _signal(child: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _manner(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
