"""The checker of limits and shares reports each violation, and nothing else."""

from __future__ import annotations

import math
from uuid import UUID, uuid4

import pytest

from faults.correctness.sharing import beyond_rate, most_in_flight, unequal_shares
from faults.correctness.verdict import Delivery, Generation, Published

LEASE = UUID(int=1 << 40)


def delivery(
    at: float, *, until: float = math.inf, expires: float = math.inf, event: UUID | None = None
) -> Delivery:
    return Delivery(event or uuid4(), LEASE, 1, at, expires, expires, touched_at=until, asked_at=at - 0.01)


def test_events_in_flight_are_counted_until_settling_begins() -> None:
    one, two, three = delivery(1.0, until=2.0), delivery(1.5, until=3.0), delivery(2.0, until=4.0)
    assert most_in_flight([one, two, three]) == 2
    assert most_in_flight([one, two, three, delivery(1.9, until=2.1)]) == 3


def test_a_lease_that_may_have_expired_or_was_superseded_is_not_in_flight() -> None:
    assert most_in_flight([delivery(1.0, expires=2.0), delivery(2.5)]) == 1
    assert most_in_flight([delivery(1.0), delivery(2.5)]) == 2
    superseded = UUID(hex="000001" + "0000000000000005" + "0000000000")
    void = Delivery(uuid4(), superseded, 1, 1.0, math.inf, math.inf)
    assert most_in_flight([void, delivery(2.5)], [Generation(1, 4, 2.0)]) == 1


@pytest.mark.parametrize(("events", "beyond"), [(23, 0), (24, 1), (40, 17)])
def test_a_rate_is_exceeded_by_events_beyond_the_burst(events: int, beyond: int) -> None:
    made = [delivery(100.0 + n / 100) for n in range(events)]
    assert beyond_rate(made, 10.0, 2.0) == beyond
    # A receive that may have been paid for outside the window does not count.
    made[-1].asked_at = 90.0
    assert beyond_rate(made, 10.0, 2.0) == max(0, beyond - 1)


@pytest.mark.parametrize(("shares", "unequal"), [("abcd", 0), ("aabbcd", 2), ("aaaabbbbcd", 2)])
def test_tenants_with_a_backlog_get_equal_shares(shares: str, unequal: int) -> None:
    published: dict[UUID, Published] = {}
    deliveries = []
    for tenant in "abcd":
        for number in range(400):
            one = uuid4()
            published[one] = Published(one, "q", tenant, number, 0.0)
    waiting = {tenant: [event for event in published.values() if event.key == tenant] for tenant in "abcd"}
    for place in range(200):
        tenant = shares[place % len(shares)]
        deliveries.append(delivery(10.0 + place, event=waiting[tenant].pop().event))
    assert unequal_shares(deliveries, published, tolerance=1.9) == (unequal, 2)


def test_a_tenant_without_a_backlog_is_not_judged() -> None:
    published: dict[UUID, Published] = {}
    for tenant, events in {"a": 300, "b": 5}.items():
        for number in range(events):
            one = uuid4()
            published[one] = Published(one, "q", tenant, number, 0.0)
    deliveries = [delivery(10.0 + place, event=event) for place, event in enumerate(published)]
    assert unequal_shares(deliveries, published) == (0, 0)
