"""Promises: retention waits for a query with a readerName; what it took from another is told, not skipped."""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgmb.errors import HistoryGone
from tests.spark.stored import ByHand, Stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(600)]


def publish(db: psycopg.Connection[Any], numbers: range) -> None:
    db.execute(
        "select pgmb.publish('t', number::text::json) from unnest(%s::int[]) number",
        [list(numbers)],
    )


def rotate(db: psycopg.Connection[Any]) -> None:
    """Closes the segment that was written to, and seals it."""
    assert db.execute("select pgmb.rotate()").fetchone() != (None,)
    db.execute("select pgmb.seal()")
    assert (
        db.execute("select from pgmb.segment where closed_at is not null and sealed_at is null").fetchall()
        == []
    )


def retain(db: psycopg.Connection[Any]) -> list[int]:
    """Drops what may be dropped, and says which segments are gone by now."""
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    db.execute("select pgmb.drop_segments()")
    rows = db.execute("select number from pgmb.segment where dropped_at is not null order by number")
    return [number for (number,) in rows]


def retain_until_gone(db: psycopg.Connection[Any], numbers: list[int]) -> None:
    """A segment that a reader still holds a lock on is dropped the next time."""
    deadline = time.monotonic() + 60
    while retain(db) != numbers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert retain(db) == numbers


def test_a_lagging_query_keeps_its_segments(
    spark: SparkSession, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    stored = Stored(spark, tmp_path, url=dsn, readerName="store", maxEventsPerTrigger=4)
    publish(db, range(6))
    stored.drain()
    confirmed = db.execute("select waiting, lag from pgmb.reader_status").fetchall()
    assert confirmed == [(0, None)], "all that is stored is confirmed, the last batch too"
    rotate(db)
    publish(db, range(6, 10))  # it lags behind this one
    rotate(db)
    publish(db, range(10, 12))
    assert retain(db) in ([], [0])  # and not the second
    stored.drain()
    assert sorted(stored.payloads()) == list(range(12))
    # The check can fail: once it has passed them, they go.
    retain_until_gone(db, [0, 1])


def test_a_query_that_lost_events_says_which(db: psycopg.Connection[Any], dsn: str) -> None:
    """Then it goes on, if it is told to."""
    stored = ByHand(url=dsn)
    publish(db, range(10))
    stored.drain()
    publish(db, range(10, 30))
    first, last = db.execute(
        "select min(seq), max(seq) from pgmb.log_main where payload::text::int >= 10"
    ).fetchall()[0]
    rotate(db)
    publish(db, range(30, 40))
    retain_until_gone(db, [0])

    with pytest.raises(HistoryGone, match="were dropped by retention") as refused:
        stored.drain()
    assert f"numbers {first} to {last}" in str(refused.value)
    assert "failOnDataLoss=false" in "".join(traceback.format_exception_only(refused.value))
    assert sorted(stored.payloads()) == list(range(10))

    stored.drain(failOnDataLoss="false")
    assert sorted(stored.payloads()) == [*range(10), *range(30, 40)]
    # From here on nothing is missing.
    publish(db, range(40, 50))
    stored.drain()
    assert sorted(stored.payloads()) == [*range(10), *range(30, 50)]
