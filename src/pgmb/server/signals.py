"""Being told to stop while mounted: a server waits for its requests, and those who listen never leave."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_STOP: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def draining(drain: Callable[[], Awaitable[None]]) -> Generator[None]:
    """Has SIGINT and SIGTERM call `drain` in this loop beside what they do anyway.

    A signal that nobody handles is left alone, and outside of the main thread all of them are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    begun: set[asyncio.Future[None]] = set()
    before = {number: signal.getsignal(number) for number in _STOP}

    def begin() -> None:
        begun.add(asyncio.ensure_future(drain()))

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)
        earlier = before[signal.Signals(number)]
        if callable(earlier):
            earlier(number, frame)

    chained = [number for number, handler in before.items() if callable(handler)]
    for number in chained:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in chained:
            # Unless somebody has put another one in its place.
            if signal.getsignal(number) is handle:
                signal.signal(number, before[number])
        for task in begun:
            task.cancel()
