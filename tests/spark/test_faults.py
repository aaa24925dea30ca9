"""Promises, on a real cluster whose driver and executors are killed: each event is read and published once.

The short form of `python -m faults spark-republish`, which reads late commits and publishes them on the way.
`spark-late-commits` and `spark-sink` take minutes each: `make score-spark` runs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.log.history import Event
from faults.spark import republish
from faults.spark.republish import disordered
from faults.spark.traffic import account
from harness.spark import Cluster

TRUTH = {name: Event(name, "k", name, "t") for name in (1, 2, 3)}

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start() as started:
        yield started


@pytest.mark.minutes
def test_what_spark_republishes_is_there_once_and_in_order(
    dsn: str, cluster: Cluster, tmp_path: Path
) -> None:
    result = republish.run(
        dsn,
        cluster,
        tmp_path,
        writers=8,
        delay=1.0,
        size=8,
        rotate_every=2.0,
        drivers=1,
        executors=1,
        per_trigger=300,
        seed=random.randrange(1 << 30),
    )
    assert result.holds, str(result)


class TestChecker:
    """A checker that cannot fail proves nothing."""

    def test_clean(self) -> None:
        assert account([1, 2, 3], TRUTH).clean
        assert disordered([1, 2, 3], TRUTH) == 0

    def test_trouble(self) -> None:
        judged = account([1, 1, 3, 9], TRUTH)
        assert not judged.clean
        assert (judged.lost, judged.phantom, judged.repeated) == (1, 1, 1)
        assert disordered([1, 3, 2], TRUTH) == 1
        assert not account([], {}).clean
