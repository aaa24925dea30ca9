"""A circuit breaker: an endpoint that fails most of the time is left alone, then tried with one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

State: TypeAlias = Literal["closed", "open", "half_open"]

WINDOW = 60.0
FEWEST_FAILURES = 5
SHARE_OF_FAILURES = 0.5
FIRST_WAIT = 10.0
LONGEST_WAIT = 300.0

_BUCKETS = 12
_WIDTH = WINDOW / _BUCKETS


class Breaker:
    """Opens at 5 failures that are at least half of the outcomes within the last minute.

    Ask `allow` before each request, and `record` its outcome. An open breaker allows nothing until
    `reopen_at`, then one request, the probe: its success closes the breaker, its failure doubles the wait.
    What was sent before the breaker opened must have ended before a probe is asked for: whatever is recorded
    then counts as the probe's outcome. The minute is counted in twelfths: recording always costs the same.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait = FIRST_WAIT
        self._opened = False
        self._probing = False
        self._reopen_at = 0.0
        self._forget_outcomes()

    @property
    def state(self) -> State:
        """What it is now; `half_open` from `reopen_at` until the probe's outcome is known."""
        if not self._opened:
            return "closed"
        return "half_open" if self._probing or self._clock() >= self._reopen_at else "open"

    @property
    def reopen_at(self) -> float | None:
        """By the clock, when a probe is allowed; None while closed."""
        return self._reopen_at if self._opened else None

    def allow(self) -> bool:
        """Whether a request may be sent now. Half-open, the first caller gets True and sends the probe."""
        if not self._opened:
            return True
        if self._probing or self._clock() < self._reopen_at:
            return False
        self._probing = True
        return True

    def record(self, ok: bool) -> None:
        """Count the outcome of a request that was allowed. While open, late outcomes count for nothing."""
        if self._opened:
            if self._probing:
                self._settle_probe(ok)
            return
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
            self._open()

    def release(self) -> None:
        """Give back a probe that was never sent, or whose outcome nobody will know."""
        self._probing = False

    def _settle_probe(self, ok: bool) -> None:
        self._probing = False
        if ok:
            self._opened = False
            self._wait = FIRST_WAIT
            self._forget_outcomes()
        else:
            self._wait = min(self._wait * 2, LONGEST_WAIT)
            self._reopen_at = self._clock() + self._wait

    def _open(self) -> None:
        self._opened = True
        self._reopen_at = self._clock() + self._wait

    def _forget_outcomes(self) -> None:
        self._place = int(self._clock() // _WIDTH)
        self._total = [0] * _BUCKETS
        self._failed = [0] * _BUCKETS
        self._outcomes = self._failures = 0

    def _advance(self, place: int) -> None:
        """Drop what is older than the window."""
        for passed in range(max(self._place + 1, place - _BUCKETS + 1), place + 1):
            bucket = passed % _BUCKETS
            self._outcomes -= self._total[bucket]
            self._failures -= self._failed[bucket]
            self._total[bucket] = self._failed[bucket] = 0
        self._place = place
