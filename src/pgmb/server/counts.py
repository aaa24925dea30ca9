"""What this process has counted since it started: plain numbers of one event loop, read by /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of durations. A long poll may wait for most of a minute."""

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class Durations:
    """A histogram: how many took at most so long, each counted once."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound with all that lies below it."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*SECONDS, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return found


@dataclass(slots=True)
class Counts:
    """One for each application that runs."""

    requests: dict[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])
    """By route, method and class of status."""
    durations: dict[str, Durations] = field(default_factory=dict[str, Durations])
    """By route, until the answer was sent; of server-sent events until it began."""
    in_progress: int = 0

    sse_clients: int = 0
    """Connected now."""
    sse_events: int = 0
    """Sent, to all clients together."""
    sse_bytes: int = 0
    sse_dropped: int = 0
    """Clients that were too slow."""
    sse_resumed: int = 0
    """Clients that came back with a position."""
    sse_reset: int = 0
    """Clients whose position was too old."""
    sse_replayed: int = 0
    """Events read again for those that came back."""

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request that was answered. Status 0: its client left before."""
        known = method if method in METHODS else "OTHER"
        which = (route, known, f"{status // 100}xx" if status else "aborted")
        self.requests[which] = self.requests.get(which, 0) + 1
        self.durations.setdefault(route, Durations()).add(seconds)
