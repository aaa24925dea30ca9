"""Whether the scheduler believes the database's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pgmb.services.scheduler import STANDS_AFTER, STEP, ClockSteps

pytestmark = pytest.mark.once

START = datetime(2026, 1, 1, tzinfo=UTC)
YEAR = timedelta(days=365)


def believed(moments: list[tuple[float, timedelta]]) -> list[bool]:
    """Looks at a clock that is ahead by so much, at these seconds."""
    at = 0.0
    steps = ClockSteps(lambda: at)
    found = []
    for second, ahead in moments:
        at = second
        found.append(steps.believes(START + timedelta(seconds=second) + ahead))
    return found


def test_a_clock_that_goes_on_is_believed() -> None:
    slow = timedelta(seconds=STEP - 1)
    assert believed([(0, timedelta()), (1, timedelta()), (3600, timedelta()), (3601, slow)]) == [True] * 4


def test_a_step_ahead_is_believed_once_it_has_stood() -> None:
    looks = [(0, timedelta()), (1, YEAR), (1 + STANDS_AFTER / 2, YEAR), (1 + STANDS_AFTER, YEAR), (99, YEAR)]
    assert believed(looks) == [True, False, False, True, True]


def test_a_clock_that_was_ahead_for_a_moment_is_believed_again_at_once() -> None:
    assert believed([(0, timedelta()), (1, YEAR), (9, timedelta()), (10, timedelta())]) == [
        True,
        False,
        True,
        True,
    ]


def test_a_step_back_is_believed_at_once_and_the_way_back_once_it_has_stood() -> None:
    looks = [(0, timedelta()), (1, -YEAR), (2, timedelta()), (2 + STANDS_AFTER, timedelta())]
    assert believed(looks) == [True, True, False, True]


def test_another_step_ahead_has_to_stand_for_as_long() -> None:
    looks = [
        (0, timedelta()),
        (1, YEAR),
        (10, 2 * YEAR),
        (1 + STANDS_AFTER, 2 * YEAR),
        (10 + STANDS_AFTER, 2 * YEAR),
    ]
    assert believed(looks) == [True, False, False, False, True]
