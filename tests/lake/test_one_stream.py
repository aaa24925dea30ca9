"""The lake and the log are one stream to Spark: the same events and offsets wherever the border lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lake.conftest import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.new_database, pytest.mark.timeout(600)]


def read(spark: SparkSession, lake: Lake, **options: Any) -> DataFrame:
    return spark.read.format("pgmb").options(url=lake.dsn, **options).load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    found = frame.select("seq", "id", "topic", "key", "payload", "headers", "published_at").collect()
    return sorted(tuple(row) for row in found)


@pytest.fixture
def three(lake: Lake) -> Lake:
    """Three sealed segments and an open one."""
    for events in (70, 50, 30):
        lake.publish(events)
    lake.publish(20, sealed=False)
    return lake


def drop(lake: Lake, *, keep: int = 0) -> None:
    """Let retention drop what is archived, but for the last ones."""
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '1 hour')")
    lake.db.execute(
        "update pgmb.segment set closed_at = closed_at - interval '2 hours',"
        " last_published_at = last_published_at - interval '2 hours' where number < %s",
        [lake.value("select max(number) from pgmb.segment where archived_at is not null") + 1 - keep],
    )
    lake.db.execute("select pgmb.drop_segments()")


def test_a_table_is_the_same_before_and_after_its_history_was_archived_and_dropped(
    spark: SparkSession, three: Lake
) -> None:
    before = rows(read(spark, three))
    assert len(before) == 170
    three.archive()
    drop(three, keep=1)
    assert three.dropped() == [0, 1]
    found = read(spark, three, maxRecordsPerPartition=60).where("key is not null and seq % 2 = 0")
    assert rows(found) == [row for row in before if row[3] is not None and row[0] % 2 == 0]


def test_a_stream_from_earliest_hands_over_while_the_border_moves(
    spark: SparkSession, three: Lake, tmp_path: Path
) -> None:
    """Between the batches of a query, and between its runs. tests/lake/test_border.py reads without a JVM."""
    three.archive()
    drop(three, keep=1)
    seen: list[int] = []
    batches = 0

    def take(frame: DataFrame, _: int) -> None:
        nonlocal batches
        batches += 1
        seen.extend(row.seq for row in frame.select("seq").collect())
        three.publish(5)
        three.archive()
        drop(three)

    for _ in range(2):
        three.publish(10, sealed=False)
        expected = {row[0] for row in three.stored()}
        expected |= {seq for (seq,) in three.db.execute("select seq from pgmb.log_main")}
        stream = spark.readStream.format("pgmb").options(
            url=three.dsn, startingOffsets="earliest", maxEventsPerTrigger=80
        )
        writer = stream.load().writeStream.foreachBatch(take).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
        assert sorted(seen) == sorted(expected), "no gap and no repeat"
    assert batches >= 4
    assert len(three.dropped()) >= 4
