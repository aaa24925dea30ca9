"""A fork of this process as a child, and memory in which its parent tells it about the others."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from pgmb.services.parent import Parent

logger = logging.getLogger("pgmb.supervisor")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Fork:
    """A fork of this process that runs a function, with the interface of asyncio's processes."""

    def __init__(
        self, run: Callable[[Parent], int], *, alive: int, reports: int, parents: Sequence[int]
    ) -> None:
        self._ended = False
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal to the child would reach the parent, through the pipe of its event loop.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become(run, alive, reports, parents, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def wait(self) -> int:
        while (code := self._reaped()) is None:
            if sys.platform == "linux":
                await _until_ended(self.pid)
            else:
                await asyncio.sleep(0.1)
        return code

    def _reaped(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._ended = bool(pid)
        return os.waitstatus_to_exitcode(status) if pid else None

    def send_signal(self, number: int) -> None:
        if self._ended:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


async def _until_ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _become(
    run: Callable[[Parent], int], alive: int, reports: int, parents: Sequence[int], signals: set[int]
) -> NoReturn:
    """Be a child from now on."""
    code = 1
    try:
        os.setsid()
        # The parent's event loop is not this process's, nor are its signal handlers and the parent's ends of
        # pipes: open in a child, these would hide the parent's end.
        asyncio._set_running_loop(None)  # noqa: SLF001
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        for descriptor in parents:
            os.close(descriptor)
        code = run(Parent(alive, reports))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        logger.exception("the process failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ProcessState(msgspec.Struct, array_like=True, frozen=True):
    """A child, as its parent sees it."""

    name: str
    pid: int | None
    """None while it does not run."""
    restarts: int
    troubled: bool
    """Whether it does not run, or has not reported for seconds."""


class _Page(msgspec.Struct, array_like=True):
    at: float
    processes: list[ProcessState]


class Board:
    """What a parent knows of its children, in memory that it shares with its forks."""

    _SLOT: Final = 1 << 18
    """Bytes for 2,000 processes. Memory that is not written takes no space."""
    _STALE_SECONDS: Final = 10.0

    def __init__(self) -> None:
        self._parent = True
        self._shared = mmap.mmap(-1, 1 + 2 * self._SLOT)
        self.write([])

    def close(self) -> None:
        """There is no parent: nothing is read any more."""
        self._parent = False

    def write(self, processes: Sequence[ProcessState]) -> None:
        text = msgspec.json.encode(_Page(time.monotonic(), list(processes[:2000])))
        # A reader sees the slot that is not being written.
        slot = 1 - self._shared[0]
        start = 1 + slot * self._SLOT
        self._shared[start : start + len(text) + 1] = text + b"\0"
        self._shared[0] = slot

    def processes(self) -> list[ProcessState]:
        return self._read().processes if self._parent else []

    def troubled(self) -> list[str]:
        """The children that do not run or report; `supervisor` if the parent does not write."""
        if not self._parent:
            return []
        page = self._read()
        late = time.monotonic() - page.at > self._STALE_SECONDS
        return [*(one.name for one in page.processes if one.troubled), *(["supervisor"] if late else [])]

    def _read(self) -> _Page:
        start = 1 + self._shared[0] * self._SLOT
        return msgspec.json.decode(self._shared[start : self._shared.find(b"\0", start)], type=_Page)
