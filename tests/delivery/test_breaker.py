"""The breaker opens, waits, probes and closes as promised: by a clock of its own, and against a naive one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb.delivery.breaker import Breaker

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
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def state(breaker: Breaker) -> str:
    return breaker.state


def fail(breaker: Breaker, times: int = 5) -> None:
    for _ in range(times):
        breaker.record(False)


def test_five_failures_open_it_and_four_do_not(breaker: Breaker) -> None:
    fail(breaker, 4)
    assert state(breaker) == "closed"
    assert not breaker.reopen_at
    assert breaker.allow()
    fail(breaker, 1)
    assert state(breaker) == "open"
    assert breaker.reopen_at == 1010
    assert not breaker.allow()


def test_less_than_half_failing_keeps_it_closed(breaker: Breaker) -> None:
    for _ in range(8):
        breaker.record(True)
    fail(breaker, 7)
    assert state(breaker) == "closed"
    fail(breaker, 1)
    assert state(breaker) == "open"


def test_what_is_older_than_a_minute_does_not_count(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 4)
    clock.now += 61
    fail(breaker, 1)
    assert state(breaker) == "closed"
    clock.now += 3600
    fail(breaker, 4)
    assert state(breaker) == "closed"


def test_one_probe_is_let_through(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += 10
    assert state(breaker) == "half_open"
    assert breaker.allow()
    assert not breaker.allow()
    assert state(breaker) == "half_open"
    breaker.record(True)
    assert state(breaker) == "closed"
    assert breaker.allow()
    fail(breaker, 4)
    assert state(breaker) == "closed"


def test_waits_double_up_to_five_minutes_and_a_success_ends_that(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    for wait in (10, 20, 40, 80, 160, 300, 300):
        assert breaker.reopen_at == clock.now + wait
        clock.now += wait
        assert breaker.allow()
        breaker.record(False)
        assert state(breaker) == "open"
    clock.now += 300
    assert breaker.allow()
    breaker.record(True)
    fail(breaker)
    assert breaker.reopen_at == clock.now + 10


def test_late_outcomes_change_nothing_while_it_is_open(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    breaker.record(True)
    fail(breaker, 20)
    assert state(breaker) == "open"
    assert breaker.reopen_at == 1010
    clock.now += 10
    breaker.record(True)
    assert state(breaker) == "half_open"


def test_a_probe_that_was_never_sent_is_given_back(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now += 10
    assert breaker.allow()
    breaker.release()
    assert state(breaker) == "half_open"
    assert breaker.allow()


def test_a_clock_that_goes_back_does_no_harm(breaker: Breaker, clock: Clock) -> None:
    clock.now = 500
    fail(breaker, 4)
    assert state(breaker) == "closed"
    fail(breaker, 1)
    assert state(breaker) == "open"


class Naive:
    """The same promises, by a list of everything."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[float, bool]] = []
        self.reopen_at: float | None = None
        self.wait = 10.0
        self.probing = False

    def allow(self, now: float) -> bool:
        if self.reopen_at is None:
            return True
        if self.probing or now < self.reopen_at:
            return False
        self.probing = True
        return True

    def record(self, now: float, ok: bool) -> None:
        if self.reopen_at is not None:
            if not self.probing:
                return
            self.probing = False
            self.outcomes = []
            self.wait = 10.0 if ok else min(300.0, self.wait * 2)
            self.reopen_at = None if ok else now + self.wait
            return
        self.outcomes.append((now, ok))
        lately = [passed for at, passed in self.outcomes if at // 5 > now // 5 - 12]
        failures = lately.count(False)
        if not ok and failures >= 5 and failures * 2 >= len(lately):
            self.reopen_at = now + self.wait

    def state(self, now: float) -> str:
        if self.reopen_at is None:
            return "closed"
        return "half_open" if self.probing or now >= self.reopen_at else "open"


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0, 9.0, 30.0, 59.0, 61.0, 700.0]),
        st.sampled_from(["ok", "failed", "failed", "ask"]),
    ),
    max_size=80,
)


@given(steps=STEPS)
def test_it_does_what_a_naive_one_does(steps: list[tuple[float, str]]) -> None:
    clock, naive = Clock(), Naive()
    breaker = Breaker(clock)
    for passed, step in steps:
        clock.now += passed
        if step == "ask":
            assert breaker.allow() == naive.allow(clock.now)
        else:
            breaker.record(step == "ok")
            naive.record(clock.now, step == "ok")
        assert state(breaker) == naive.state(clock.now)
        assert breaker.reopen_at == naive.reopen_at
