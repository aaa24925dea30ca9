"""Promises, on a real cluster whose driver and executors are killed: each event is read and published once.

The short forms of `python -m faults spark-late-commits`, `spark-sink` and `spark-republish`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import spark_late_commits, spark_republish, spark_sink
from faults.history import Event
from faults.spark_republish import disordered
from faults.spark_traffic import account
from harness.spark import Cluster

TRUTH = {name: Event(name, "k", name, "t") for name in (1, 2, 3)}

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.start() as started:
        yield started


def test_spark_misses_no_late_commit(dsn: str, cluster: Cluster, tmp_path: Path) -> None:
    result = spark_late_commits.run(
        dsn,
        cluster,
        tmp_path,
        writers=20,
        delay=2.0,
        size=8,
        rotate_every=2.0,
        drivers=1,
        executors=1,
        per_trigger=300,
        seed=random.randrange(1 << 30),
    )
    assert result.account.clean, str(result)
    assert result.rolled_back, str(result)
    assert result.dropped, str(result)
    # The control: a reader by the highest number loses events of the same run.
    assert result.control.lost, str(result)


def test_what_spark_publishes_is_published_once(dsn: str, cluster: Cluster, tmp_path: Path) -> None:
    runs = spark_sink.BRIEF[::2]  # one of each case
    assert {run.case for run in runs} >= {"retry", "speculation", "layout", "after commit"}
    result = spark_sink.run(dsn, cluster, tmp_path, runs, seed=random.randrange(1 << 30))
    assert result.holds, str(result)
    assert result.refused, str(result)
    assert result.driver_kills == 1, str(result)


def test_what_spark_republishes_is_there_once_and_in_order(
    dsn: str, cluster: Cluster, tmp_path: Path
) -> None:
    result = spark_republish.run(
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
