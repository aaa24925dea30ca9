"""Publish what publishers hold at a process's end: at exit, at SIGTERM, in multiprocessing's children."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol
from weakref import WeakSet

from pgmb._core import loggers

CLOSE_WITHIN_SECONDS = 5.0
"""Seconds that the end of a process, or of an event loop, waits for all of its publishers."""

logger = loggers.logger("pgmb")


class Closable(Protocol):
    @property
    def pending(self) -> int: ...
    @property
    def inherited(self) -> bool: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...
    def close(self, timeout: float | None = ...) -> Coroutine[Any, Any, None] | None: ...
    def hurry(self) -> None: ...
    def give_up(self) -> None: ...


_open: WeakSet[Closable] = WeakSet()
_finalized_in: int | None = None
"""The process that runs `_close_all` among multiprocessing's finalizers."""


def remember(publisher: Closable) -> None:
    """Close it at the end of the process, unless it is forgotten before."""
    if not _open:
        # Handlers run in reverse order: this one comes before those of what publishing needs.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(publisher)
    _finalize()
    _catch_sigterm()


def forget(publisher: Closable) -> None:
    _open.discard(publisher)


def _finalize() -> None:
    """Children of multiprocessing, and of Celery's billiard, end without atexit's handlers."""
    global _finalized_in  # noqa: PLW0603
    multiprocessing: Any = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None and _finalized_in != os.getpid():
        _finalized_in = os.getpid()
        # Finalizers of a high priority run first: before those of queues and managers.
        multiprocessing.Finalize(None, _close_all, exitpriority=1000)


def _catch_sigterm() -> None:
    """Close publishers before SIGTERM ends the process, where the program leaves the signal to the system."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python installs handlers in the main thread only
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _: object) -> None:
    # A second signal ends the process at once.
    signal.signal(number, signal.SIG_DFL)

    def end() -> None:
        try:
            _close_all()
        finally:
            os.kill(os.getpid(), number)
            # The first process of a container ignores signals without a handler.
            time.sleep(1)
            os._exit(128 + number)

    # The signal may have interrupted a caller who holds a publisher's lock: let the caller go on.
    threading.Thread(target=end, name="pgmb SIGTERM").start()


def _close_all() -> None:
    deadline = time.monotonic() + CLOSE_WITHIN_SECONDS
    for publisher in _left_open():
        if publisher.inherited:
            continue  # the parent has it too, and its events
        if publisher.pending:
            logger.warning("a publisher was not closed; flushing %s events at exit", publisher.pending)
        publisher.hurry()
        try:
            _close(publisher, max(0.1, deadline - time.monotonic()))
        except Exception as error:
            logger.error("events are lost at exit: %s", error)
            publisher.give_up()


def _left_open() -> list[Closable]:
    while True:
        try:
            return list(_open)
        except RuntimeError:
            # Another thread added a publisher meanwhile. A lock would not do: a fork may copy it locked.
            continue


def _close(publisher: Closable, seconds: float) -> None:
    closing = publisher.close(seconds)
    loop = publisher.loop
    if closing is None or loop is None:
        return
    if loop.is_running():
        # In another thread than this one, which is the main thread after its last loop, or a thread of ours.
        asyncio.run_coroutine_threadsafe(closing, loop).result(seconds + 1)
        return
    try:
        loop.run_until_complete(closing)
    finally:
        closing.close()
