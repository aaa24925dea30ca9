"""How many events to lease at once: as many as are handled in a moment. No I/O."""

from __future__ import annotations

_MOST_EVENTS = 500
_SHORT_LEASE_SECONDS = 0.25
_LONG_LEASE_SECONDS = 1.0


class LeaseSize:
    """Starts with an event a worker, doubles while leases are quickly done, halves when they take long.

    A long lease keeps its last events from other processes, and all of it from being settled.
    """

    def __init__(self, concurrency: int, batch: int | None = None) -> None:
        self._least = batch or concurrency
        self._most = batch or max(concurrency, _MOST_EVENTS)
        self.next = self._least

    def took(self, events: int, seconds: float) -> None:
        """A lease of so many events was done in so many seconds."""
        if seconds > _LONG_LEASE_SECONDS:
            self.next = max(self.next // 2, self._least)
        elif seconds < _SHORT_LEASE_SECONDS and events >= self.next:
            self.next = min(self.next * 2, self._most)
