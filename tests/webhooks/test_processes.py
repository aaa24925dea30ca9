"""Promises of dispatchers in processes of their own: kills, limits across them, endpoints that misbehave."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from faults.webhook import chaos, kills, limits

pytestmark = [pytest.mark.slow, pytest.mark.once]


def test_dispatchers_killed_at_every_step_lose_nothing(dsn: str, tmp_path: Path) -> None:
    result = kills.run(dsn, tmp_path, times=1, seed=random.randrange(1 << 30))
    assert result.holds, str(result)


def test_limits_hold_across_dispatchers(dsn: str) -> None:
    result = limits.run(dsn, dispatchers=2, many=5, measured=1.0, settling_in=1.0)
    assert 0 < result.in_flight <= limits.IN_FLIGHT, str(result)
    assert 0 < result.rate <= 1.2 * limits.RATE, str(result)
    assert 0 < max(result.many) <= 1.5 * limits.MANY_RATE, str(result)


def test_endpoints_that_misbehave_keep_nothing_from_the_others(dsn: str) -> None:
    result = chaos.run(dsn, deliveries=230, dispatchers=1)
    assert result.holds, str(result)
