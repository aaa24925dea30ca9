"""The breaker trips as promised: by a clock of its own, and against a naive one."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb.webhooks.outcomes import CircuitBreaker

pytestmark = pytest.mark.once


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock)


_events = count()


def tripped_by(breaker: CircuitBreaker, failures: int) -> bool:
    for _ in range(failures):
        breaker.failed(str(next(_events)))
    return breaker.tripped


def test_five_failures_trip_it_and_four_do_not(breaker: CircuitBreaker) -> None:
    assert not tripped_by(breaker, 4)
    assert tripped_by(breaker, 1)


def test_an_event_that_fails_again_counts_once(breaker: CircuitBreaker) -> None:
    for event in "abcdabcdabcd":
        breaker.failed(event)
    assert not breaker.tripped
    breaker.failed("e")
    assert breaker.tripped


def test_an_event_counts_for_a_minute_after_its_last_failure(breaker: CircuitBreaker, clock: Clock) -> None:
    for events in ("abcd", "a", "a", "a"):
        for event in events:
            breaker.failed(event)
        clock.now += 20
    for event in "efg":
        breaker.failed(event)
    assert not breaker.tripped
    breaker.failed("h")
    assert breaker.tripped


def test_less_than_half_failing_does_not(breaker: CircuitBreaker) -> None:
    for _ in range(8):
        breaker.succeeded()
    assert not tripped_by(breaker, 7)
    assert tripped_by(breaker, 1)


def test_what_is_older_than_a_minute_does_not_count(breaker: CircuitBreaker, clock: Clock) -> None:
    assert not tripped_by(breaker, 4)
    clock.now += 61
    assert not tripped_by(breaker, 1)
    clock.now += 3600
    assert not tripped_by(breaker, 4)


def test_successes_do_not_mend_it(breaker: CircuitBreaker) -> None:
    assert tripped_by(breaker, 5)
    for _ in range(100):
        breaker.succeeded()
    assert breaker.tripped


def test_a_clock_that_goes_back_does_no_harm(breaker: CircuitBreaker, clock: Clock) -> None:
    clock.now = 500
    assert not tripped_by(breaker, 4)
    assert tripped_by(breaker, 1)


class Naive:
    """The same promises, by a list of everything."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[float, str | None]] = []
        self.tripped = False

    def record(self, now: float, failed: str | None) -> None:
        self.outcomes.append((now, failed))
        lately = [event for at, event in self.outcomes if at // 5 > now // 5 - 12]
        failures = len(set(lately) - {None})
        self.tripped |= failed is not None and failures >= 5 and failures >= lately.count(None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0, 9.0, 30.0, 59.0, 61.0, 700.0]),
        st.sampled_from([None, None, None, None, *"abcdefgh"]),
    ),
    max_size=80,
)


@given(steps=STEPS)
def test_it_does_what_a_naive_one_does(steps: list[tuple[float, str | None]]) -> None:
    clock, naive = Clock(), Naive()
    breaker = CircuitBreaker(clock)
    for passed, failed in steps:
        clock.now += passed
        if failed is None:
            breaker.succeeded()
        else:
            breaker.failed(failed)
        naive.record(clock.now, failed)
        assert breaker.tripped == naive.tripped
