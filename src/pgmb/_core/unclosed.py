"""Close publishers at the end of the process that were left open."""

from __future__ import annotations

import atexit
import logging
from typing import Protocol
from weakref import WeakSet

from pgmb.errors import PgmbError

CLOSE_WITHIN_SECONDS = 5.0
"""Seconds that the end of the process waits for each."""

logger = logging.getLogger("pgmb")


class Closable(Protocol):
    @property
    def pending(self) -> int: ...
    @property
    def inherited(self) -> bool: ...
    def close(self, timeout: float | None = ...) -> None: ...


_open: WeakSet[Closable] = WeakSet()


def remember(publisher: Closable) -> None:
    """Close it at the end of the process, unless it is forgotten before."""
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open.add(publisher)


def forget(publisher: Closable) -> None:
    _open.discard(publisher)


def aremember(publisher: object) -> None:
    """Nothing: at the end of the process there is no event loop. Its task says so when it is cancelled."""


def aforget(publisher: object) -> None:
    """Nothing."""


def _close_all() -> None:
    for publisher in list(_open):
        if publisher.inherited:
            continue  # the parent process has it too, and its events
        logger.warning("a publisher was not closed; flushing %s events at exit", publisher.pending)
        try:
            publisher.close(CLOSE_WITHIN_SECONDS)
        except PgmbError as error:
            logger.error("events are lost at exit: %s", error)
