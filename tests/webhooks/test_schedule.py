"""Waits between attempts follow the schedule, a fifth shorter or longer, and end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb.webhooks.outcomes import DEFAULT_SCHEDULE, delay_after

pytestmark = pytest.mark.once


def middle() -> float:
    return 0.5


def test_the_default_schedule_is_that_of_standard_webhooks() -> None:
    waits = [delay_after(DEFAULT_SCHEDULE, attempt, middle) for attempt in range(1, 12)]
    assert waits == [0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400, None]


def test_an_empty_schedule_gives_up_at_once() -> None:
    assert delay_after((), 1, middle) is None


@given(attempt=st.integers(1, 10), seed=st.integers())
def test_jitter_is_a_fifth_to_either_side(attempt: int, seed: int) -> None:
    plain = DEFAULT_SCHEDULE[attempt - 1]
    delay = delay_after(DEFAULT_SCHEDULE, attempt, random.Random(seed).random)
    assert delay is not None
    assert plain * 0.8 <= delay <= plain * 1.2


def test_jitter_reaches_both_ends() -> None:
    assert delay_after((100.0,), 1, lambda: 0.0) == pytest.approx(80)
    assert delay_after((100.0,), 1, lambda: 0.999_999) == pytest.approx(120, rel=1e-3)
