"""How many events to ask a queue for after errors of the database."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

_UNREADABLE: Final = (
    errors.ProgramLimitExceeded,
    errors.DataCorrupted,
    errors.IndexCorrupted,
    # "missing chunk number 0 for toast value": a stored value is damaged.
    errors.InternalError_,
)


def is_lost_connection(error: psycopg.Error) -> bool:
    """Whether the server did not answer: no queue is at fault."""
    return isinstance(error, psycopg.OperationalError) and error.sqlstate is None


class BatchLimit:
    """Halves a queue's batch with each error, down to one event, and doubles it with each success.

    One event that the server cannot read then fails by itself. `failures` counts its attempts.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        self.failures = 0
        """How often in a row a batch of one event could not be read."""

    def of(self, wanted: int) -> int:
        """How many events to ask for, of as many as are wanted."""
        return wanted if self._most is None else min(wanted, self._most)

    def failed(self, asked: int, error: BaseException) -> None:
        """A batch of that size failed."""
        self._most = max(1, asked // 2)
        self.failures = self.failures + 1 if asked == 1 and isinstance(error, _UNREADABLE) else 0

    def succeeded(self, asked: int, wanted: int) -> None:
        """A batch of that size was received where `wanted` events were wanted."""
        self.failures = 0
        if self._most is not None:
            self._most = None if asked >= wanted else self._most * 2
