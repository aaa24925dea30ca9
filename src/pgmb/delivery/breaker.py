"""A circuit breaker: whether an endpoint fails most of the time. No I/O.

What follows, when to try again and who may, is for all dispatchers to agree on: pgmb.trip_endpoint and
pgmb.probe_endpoint.
"""

from __future__ import annotations

from collections.abc import Callable

WINDOW = 60.0
FEWEST_FAILURES = 5
SHARE_OF_FAILURES = 0.5

_BUCKETS = 12
_WIDTH = WINDOW / _BUCKETS


class Breaker:
    """Trips at 5 failures that are at least half of the outcomes within the last minute, and stays so.

    The minute is counted in twelfths, so that recording always costs the same.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.tripped = False
        self._clock = clock
        self._place = int(clock() // _WIDTH)
        self._total = [0] * _BUCKETS
        self._failed = [0] * _BUCKETS
        self._outcomes = self._failures = 0

    def record(self, ok: bool) -> None:
        """Count the outcome of a request."""
        place = int(self._clock() // _WIDTH)
        if place > self._place:
            self._advance(place)
        bucket = self._place % _BUCKETS
        self._total[bucket] += 1
        self._outcomes += 1
        if ok:
            return
        self._failed[bucket] += 1
        self._failures += 1
        if self._failures >= FEWEST_FAILURES and self._failures >= SHARE_OF_FAILURES * self._outcomes:
            self.tripped = True

    def _advance(self, place: int) -> None:
        """Drop what is older than the window."""
        for passed in range(max(self._place + 1, place - _BUCKETS + 1), place + 1):
            bucket = passed % _BUCKETS
            self._outcomes -= self._total[bucket]
            self._failures -= self._failed[bucket]
            self._total[bucket] = self._failed[bucket] = 0
        self._place = place
