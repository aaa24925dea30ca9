"""The lake and the log are one stream to Spark: the same events and offsets wherever the border lies."""

from __future__ import annotations

from collections.abc import Iterator
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
    for events in (700, 500, 300):
        lake.publish(events)
    lake.publish(200, sealed=False)
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
    assert len(before) == 1700
    three.archive()
    drop(three, keep=1)
    assert three.dropped() == [0, 1]
    assert rows(read(spark, three, maxRecordsPerPartition=600)) == before
    assert rows(read(spark, three).where("key is not null and seq % 2 = 0")) == [
        row for row in before if row[3] is not None and row[0] % 2 == 0
    ]


def test_a_stream_from_earliest_hands_over_while_the_border_moves(
    spark: SparkSession, three: Lake, tmp_path: Path
) -> None:
    three.archive()
    drop(three, keep=1)
    expected = {row[0] for row in three.stored()}
    seen: list[int] = []
    for round_number in range(2):
        for batch in batches(spark, three, tmp_path, maxEventsPerTrigger=400):
            seen += batch
            # The border moves between batches of a query, and between its runs.
            three.archive()
            drop(three)
        three.publish(100, sealed=round_number % 2 == 0)
    seen += [seq for batch in batches(spark, three, tmp_path) for seq in batch]
    three.publish(0)
    three.archive()
    expected |= {row[0] for row in three.stored()}
    assert len(three.dropped()) >= 4
    assert sorted(seen) == sorted(expected), "no gap and no repeat"


def batches(spark: SparkSession, lake: Lake, folder: Path, **options: Any) -> Iterator[list[int]]:
    """The batches of a query that continues where the one before ended."""
    found: list[list[int]] = []
    stream = (
        spark.readStream.format("pgmb").options(url=lake.dsn, startingOffsets="earliest", **options).load()
    )
    query = (
        stream.writeStream.foreachBatch(lambda frame, _: found.append([row.seq for row in frame.collect()]))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    yield from found
