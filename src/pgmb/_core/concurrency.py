"""Waiting, for tasks and threads alike: flags, conditions, background work, growing pauses.

The Async names are those that `make sync` turns into the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from psycopg import AsyncConnection, Connection


class AsyncFlag:
    """An event that can be waited for with a limit."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float | None) -> bool:
        """True as soon as it is set, False after that many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


class Flag:
    """An event that can be waited for with a limit."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float | None) -> bool:
        """True as soon as it is set, False after that many seconds."""
        return self._event.wait(seconds)


AsyncLock: TypeAlias = asyncio.Lock
Lock: TypeAlias = threading.Lock


class AsyncCondition(asyncio.Condition):
    """A condition that can be waited for with a limit, as `threading.Condition` can."""

    async def wait(self, timeout: float | None = None) -> bool:  # type: ignore[override]  # noqa: ASYNC109
        """True if notified, False after that many seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await super().wait()
        except TimeoutError:
            return False


Condition: TypeAlias = threading.Condition


class AsyncBackground:
    """Work beside the caller's: a task."""

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = asyncio.create_task(work(), name=name)

    async def stop(self, reading: AsyncConnection[Any] | None) -> None:
        """Cancel it and wait for its end. `reading` is what a thread would have to be torn away from."""
        self._task.cancel()
        await asyncio.wait([self._task])


class Background:
    """Work beside the caller's: a thread, which ends with the process."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    def stop(self, reading: Connection[Any] | None) -> None:
        """Wait for its end, which the caller has asked for; end what it reads from, for it to notice."""
        if reading is not None:
            # Through a second descriptor: closing the connection itself is up to the thread.
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(reading.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)
        # It may be about to connect, which cannot be interrupted: it will find out afterwards.
        self._thread.join(2.0)


FIRST_PAUSE_SECONDS: Final = 0.005
LONGEST_PAUSE_SECONDS: Final = 0.5
LISTENING_PAUSE_SECONDS: Final = 1.0
"""Between looks at a queue whose news a listener announces: retries that fall due are not announced."""


class Pace:
    """Short pauses after something was found, each twice the one before until the longest."""

    def __init__(self, first: float = FIRST_PAUSE_SECONDS, longest: float = LONGEST_PAUSE_SECONDS) -> None:
        self._first = first
        self._longest = longest
        self._next = first

    def found(self) -> None:
        """Something was there: look again soon."""
        self._next = self._first

    @property
    def at_rest(self) -> bool:
        """Whether nothing was found for so long that the pauses grow no more."""
        return self._next >= self._longest

    def pause(self) -> float:
        """How long to wait now, in seconds."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return pause
