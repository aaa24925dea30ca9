"""Promises: workers of an ordered queue may die, the order of a key holds; one bad event harms no other."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from faults.queue import limits, ordered
from faults.worker import poison


@pytest.mark.slow
@pytest.mark.parametrize("bare", [True, False], ids=["loop", "pgmb work"])
def test_an_ordered_queue_whose_workers_are_killed(dsn: str, tmp_path: Path, bare: bool) -> None:
    result = ordered.run(
        dsn,
        tmp_path,
        keys=40,
        events=100 if bare else 250,
        workers=3,
        size=20,
        bare=bare,
        # At once: `pgmb work` needs a fifth of a second for all of it.
        kill_every=0.05,
        most_kills=3,
        rounds=1,
        shards=None,
        goal=0.0,
        seed=random.randrange(1 << 30),
    )
    assert result.holds, str(result)
    assert result.kills, "drained before anybody was killed"


@pytest.mark.slow
def test_payloads_and_handlers_that_fail_in_every_way(dsn: str, tmp_path: Path) -> None:
    result = poison.run(dsn, tmp_path, events=120, processes=2, seed=random.randrange(1 << 30))
    assert result.holds, str(result)


@pytest.mark.slow
def test_no_more_in_flight_than_allowed_across_processes(dsn: str, tmp_path: Path) -> None:
    result = limits.run(dsn, tmp_path, processes=3, measured=1.2)
    assert 0 < result.in_flight <= limits.IN_FLIGHT, str(result)
    assert result.rate <= 1.2 * limits.RATE, str(result)
