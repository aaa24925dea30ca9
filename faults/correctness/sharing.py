"""The checker of limits and shares, from what consumers recorded. No I/O.

It counts only what is certain. An event is in flight from its delivery until its consumer began to settle it,
or its lease may have expired. A delivery was paid for between the moments before and after its receive.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from faults.correctness.verdict import Delivery, Generation, Published, superseded_at

BURST = 0.25
"""Seconds whose rate may be used at once after a pause."""


def most_in_flight(deliveries: Sequence[Delivery], generations: Sequence[Generation] = ()) -> int:
    """The most events that were certainly in flight at once."""
    changes: list[tuple[float, int]] = []
    for one in deliveries:
        until = min(one.touched_at, one.expires_from, superseded_at(one.lease, generations))
        if one.at < until:
            changes += [(one.at, 1), (until, -1)]
    most = held = 0
    # At one moment, ends come first.
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def beyond_rate(deliveries: Sequence[Delivery], rate: float, window: float) -> int:
    """By how many events the limit of a rate was exceeded in the worst window of so many seconds."""
    allowed = math.floor(rate * (window + max(BURST, 1 / rate))) + 1
    made = sorted(deliveries, key=lambda one: one.asked_at)
    worst = 0
    for place, first in enumerate(made):
        within = 0
        for one in made[place:]:
            if one.asked_at > first.asked_at + window:
                break
            within += one.at <= first.asked_at + window
        worst = max(worst, within - allowed)
    return worst


def unequal_shares(
    deliveries: Sequence[Delivery],
    published: Mapping[UUID, Published],
    *,
    size: int = 100,
    tolerance: float = 1.5,
) -> tuple[int, int]:
    """Windows of `size` first deliveries in which tenants had unequal shares, and how many were judged.

    A window is judged by the tenants that had a backlog all through it, if these are two or more.
    """
    fresh = sorted((one for one in deliveries if one.attempt == 1), key=lambda one: one.at)
    first_at = {one.event: one.at for one in reversed(fresh)}
    waiting: dict[str | None, list[tuple[float, float]]] = {}
    for event in published.values():
        waiting.setdefault(event.key, []).append((event.at, first_at.get(event.event, math.inf)))
    unequal = judged = 0
    for start in range(0, len(fresh) - size + 1, size):
        window = fresh[start : start + size]
        begin, end = window[0].at, window[-1].at
        # Each has more waiting than a window holds: none of them can have run dry in between.
        lagging = {
            tenant
            for tenant, events in waiting.items()
            if sum(at < begin and taken > end for at, taken in events) >= size
        }
        taken = Counter(published[one.event].key for one in window if one.event in published)
        shares = [taken[tenant] for tenant in lagging]
        if len(shares) > 1:
            judged += 1
            unequal += max(shares) > tolerance * max(min(shares), 1)
    return unequal, judged
