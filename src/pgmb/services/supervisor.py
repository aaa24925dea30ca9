"""Child processes under one parent, which restarts those that end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from pgmb.services.fork import Board, Fork, ProcessState
from pgmb.services.parent import PARENT_PIPE, REPORT_PIPE, Parent

logger = logging.getLogger("pgmb.supervisor")

EXIT_WITHOUT_RESTART = 2
"""The exit code of a process that cannot start, such as one whose app cannot be imported."""

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
# A process that ran for so long did not fail from the start.
_STABLE_AFTER_SECONDS = 10.0
_SILENT_SECONDS = 20.0
_BACKGROUND_ENDS_WITHIN_SECONDS = 10.0

_MOST_FAILURES = 10
"""Of a fork in a row: this process ends, for an orchestrator to see it."""
_LATE_SECONDS = 3.0
"""A fork that has not reported for so long is in trouble."""

_LOOK_EVERY_SECONDS = 0.5
_SETTLED_SECONDS = 0.1
_PASSED_OVER = {"node_modules", "site-packages"}


class Child(NamedTuple):
    """A process to keep running: a command, or a function in a fork of this process."""

    name: str
    """For the log."""
    command: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    background: bool = False
    """Whether it serves the others: it ends after them, its refusal to work ends no other, a change of files
    does not restart it, and it is killed and replaced if it does not report for 20 seconds."""
    run: Callable[[Parent], int] | None = None
    """Returns the exit code. A fork shares the memory of what this process has imported. It is killed and
    replaced if it does not report, or reports that it hangs. If it fails again and again, all end."""


Then: TypeAlias = Callable[[str], Sequence[Child]]


async def keep(children: Sequence[Child], board: Board, started: Callable[[], None] = lambda: None) -> int:
    """Keep forks running until SIGTERM or SIGINT, and write on the board which of them do not.

    `started` is called once signals are handled. Returns the exit code. Signals as in `supervise`.
    """
    supervisor = Supervisor(None, board=board)
    _on_signals(supervisor)
    started()
    for child in children:
        supervisor.start(child)
    await supervisor.finish()
    return supervisor.code


async def supervise(
    first: Child, then: Then, *, reload: Path | None = None, board: Board | None = None
) -> int:
    """Keep processes running until SIGTERM or SIGINT, then end them in good order. Returns the exit code.

    A SIGINT after that kills them. A second SIGTERM does not: launchers pass on one that all processes got.

    `first` starts alone, so that a mistake is told once. When it reports that it works, the children that
    `then` makes of its report start. If it ends before that, the supervisor ends, unless it reloads.

    `reload`: start processes again whenever a Python file in this folder changes. A process that cannot be
    started waits for the next change.
    """
    supervisor = Supervisor(then, waits_for_change=reload is not None, board=board)
    _on_signals(supervisor)
    async with asyncio.TaskGroup() as group:
        if reload is not None:
            files = await asyncio.to_thread(python_files, reload)
            group.create_task(supervisor.reload(reload, files))
        supervisor.start(first)
        await supervisor.finish()
    return supervisor.code


def _on_signals(supervisor: Supervisor) -> None:
    loop, seen = asyncio.get_running_loop(), False

    def signalled(number: int) -> None:
        nonlocal seen
        if seen and number == signal.SIGINT:
            supervisor.kill(128 + number)
        else:
            supervisor.end()
        seen = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)


class Supervisor:
    """Keeps children running in the running event loop until `end`."""

    def __init__(
        self,
        then: Then | None = lambda report: (),
        *,
        waits_for_change: bool = False,
        board: Board | None = None,
    ) -> None:
        self._board = board
        self._reported: dict[str, float] = {}
        """When each running fork reported last, by its name."""
        self._starts: dict[str, int] = {}
        self.code = 0
        self._reading, self._writing = os.pipe()
        self._then = then
        self._waits_for_change = waits_for_change
        self._ended = asyncio.Event()
        self._news = asyncio.Event()
        """Set when the files changed, and at the end. The next change has an event of its own."""
        self._closing = asyncio.Event()
        """Set when the processes in the background shall end."""
        self._keeping: dict[asyncio.Task[None], Child] = {}
        self._running: dict[asyncio.subprocess.Process | Fork, Child] = {}

    def start(self, child: Child) -> None:
        """Keep a child running from now on."""
        task = asyncio.create_task(self._keep(child), name=f"pgmb {child.name}")
        self._keeping[task] = child

    def end(self) -> None:
        """Tell the children to end, those in the background last."""
        self._ended.set()
        self._news.set()
        for process, child in self._running.items():
            if not child.background:
                _signal(process, signal.SIGTERM)

    def kill(self, code: int) -> None:
        """End all children at once, and exit with this code."""
        self.code = code
        self.end()
        self._signal_running(signal.SIGKILL)

    async def finish(self) -> None:
        """Wait until the children have ended: after `end`, or because they cannot work."""
        try:
            while front := [task for task, child in self._keeping.items() if not child.background]:
                done, _ = await asyncio.wait(front, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del self._keeping[task]
                    await task
            self.end()
            self._closing.set()
            self._signal_running(signal.SIGTERM)
            if self._keeping:
                _, late = await asyncio.wait(self._keeping, timeout=_BACKGROUND_ENDS_WITHIN_SECONDS)
                self._signal_running(signal.SIGKILL)
                await asyncio.gather(*late)
        finally:
            os.close(self._writing)
            os.close(self._reading)

    async def reload(self, folder: Path, files: Mapping[str, int]) -> None:
        """Restart children when a file changes, until `end`."""
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
            for process, child in self._running.items():
                if not child.background:
                    _signal(process, signal.SIGTERM)

    async def _keep(self, child: Child) -> None:
        pause, failures = _FIRST_PAUSE_SECONDS, 0
        while not self._ended.is_set():
            # Of before the start: what changes while the process starts is not in it.
            news = self._ended if child.background else self._news
            began = time.monotonic()
            code = await self._run(child, news)
            if self._ended.is_set():
                if not child.background:
                    self.code = self.code or max(code, 0)
                return
            if news.is_set():
                pause = _FIRST_PAUSE_SECONDS
            elif code == EXIT_WITHOUT_RESTART and child.background:
                # It has told why.
                return
            elif code == EXIT_WITHOUT_RESTART and self._waits_for_change:
                logger.warning("%s did not start; waiting for a file to change", child.name)
                await news.wait()
            elif not child.background and self._unproved:
                self.code = code if code >= 0 else 128 - code
                self.end()
            else:
                if time.monotonic() - began > _STABLE_AFTER_SECONDS:
                    pause, failures = _FIRST_PAUSE_SECONDS, 0
                failures += 1
                if child.run is not None and failures >= _MOST_FAILURES:
                    logger.critical("%s failed %d times in a row; ending all", child.name, failures)
                    self.code = 1
                    self.end()
                    return
                logger.warning("%s ended (%s); restarting in %.1f s", child.name, _manner(code), pause)
                await _within(news, pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    @property
    def _unproved(self) -> bool:
        """Whether no child has worked yet, so that its failure is most likely a mistake that stays."""
        return self._then is not None and not self._waits_for_change

    async def _run(self, child: Child, news: asyncio.Event) -> int:
        reading, writing = os.pipe()
        process: asyncio.subprocess.Process | Fork
        try:
            if child.run is not None:
                process = Fork(
                    child.run, alive=self._reading, reports=writing, parents=[reading, self._writing]
                )
                self._reported[child.name] = time.monotonic()
            else:
                # A session of its own: Ctrl-C in a terminal goes to the parent alone, who decides what it
                # means.
                process = await asyncio.create_subprocess_exec(
                    *child.command,
                    env={**child.environment, PARENT_PIPE: str(self._reading), REPORT_PIPE: str(writing)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[self._reading, writing],
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        if child.run is not None:
            logger.info("%s runs in process %d", child.name, process.pid)
        self._running[process] = child
        self._starts[child.name] = self._starts.get(child.name, 0) + 1
        self._tell()
        reports = os.fdopen(reading, "rb", buffering=0)
        hearing = asyncio.create_task(self._hear(child, process, reports))
        try:
            if (self._closing if child.background else news).is_set():
                process.terminate()
            return await process.wait()
        finally:
            hearing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hearing
            reports.close()
            del self._running[process]
            self._reported.pop(child.name, None)
            self._tell()

    def _tell(self) -> None:
        if self._board is None:
            return
        now = time.monotonic()
        running = {child.name: process.pid for process, child in self._running.items()}
        self._board.write(
            [
                ProcessState(
                    child.name,
                    running.get(child.name),
                    max(self._starts.get(child.name, 0) - 1, 0),
                    child.name not in running or now - self._reported.get(child.name, now) > _LATE_SECONDS,
                )
                for child in self._keeping.values()
            ]
        )

    async def _hear(self, child: Child, process: asyncio.subprocess.Process | Fork, pipe: IO[bytes]) -> None:
        """Take a child's reports, each a line."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        watched = child.background or child.run is not None
        try:
            while True:
                try:
                    async with asyncio.timeout(_SILENT_SECONDS if watched else None):
                        line = await reader.readline()
                except TimeoutError:
                    logger.warning("%s is silent for %.0f s; killing it", child.name, _SILENT_SECONDS)
                    _signal(process, signal.SIGKILL)
                    return
                if not line:
                    return
                if watched:
                    if child.run is not None:
                        self._reported[child.name] = time.monotonic()
                        self._tell()
                    if lacking := json.loads(line):
                        logger.error("%s makes no progress (%s); killing it", child.name, lacking)
                        _signal(process, signal.SIGKILL)
                elif not child.background and self._then is not None and not self._ended.is_set():
                    then, self._then = self._then, None
                    for further in then(json.loads(line)):
                        self.start(further)
        finally:
            transport.close()

    def _signal_running(self, number: int) -> None:
        for process in self._running:
            _signal(process, number)


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


def _signal(process: asyncio.subprocess.Process | Fork, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _manner(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
