"""The lake and the log are one stream to Spark: the same events and offsets wherever the border lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
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
    some = {"subscribe": "order.1,order.3"}
    chosen = rows(read(spark, three, **some))
    matching = rows(read(spark, three, subscribePattern="order.[12]$"))
    three.archive()
    assert rows(read(spark, three)) == before, "archived, and in the log"
    drop(three, keep=1)
    assert three.dropped() == [0, 1]
    assert rows(read(spark, three)) == before
    assert rows(read(spark, three, maxRecordsPerPartition=150)) == before, "cut into many parts"
    assert rows(read(spark, three, **some)) == chosen
    assert rows(read(spark, three, subscribePattern="order.[12]$")) == matching
    assert rows(read(spark, three).where("key is not null and seq % 2 = 0")) == [
        row for row in before if row[3] is not None and row[0] % 2 == 0
    ]
    assert read(spark, three).count() == 1700
    assert len(rows(read(spark, three, tier="log"))) == 500, "what the log has"


def test_times_and_positions_lead_into_the_lake(spark: SparkSession, three: Lake) -> None:
    position = three.value("select pgmb.position()::text")
    three.publish(100)
    after = {"startingOffsets": json.dumps({"main": position})}
    upto = {"endingOffsets": json.dumps({"main": position})}
    later, earlier = rows(read(spark, three, **after)), rows(read(spark, three, **upto))
    assert (len(later), len(earlier)) == (100, 1700)
    moment = three.value("select min(published_at) from pgmb.segment_1_1")
    since = {"startingTimestamp": moment.isoformat()}
    until = {"endingTimestamp": (moment + timedelta(microseconds=1)).isoformat()}
    at_once = [row for row in rows(read(spark, three)) if row[6] >= moment.replace(tzinfo=None)]
    begun = rows(read(spark, three, **until))
    three.archive()
    drop(three)
    assert three.dropped() == [0, 1, 2, 3]
    assert rows(read(spark, three, **after)) == later
    assert rows(read(spark, three, **upto)) == earlier
    assert rows(read(spark, three, **until)) == begun
    assert len(rows(read(spark, three, **since))) == len(at_once)


def test_late_commits_are_found_in_the_lake(spark: SparkSession, lake: Lake, connect: Any) -> None:
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute("insert into pgmb.log_main (topic, payload) values ('late', '1')")
    lake.publish(50, sealed=False)
    position = lake.value("select pgmb.position()::text")
    late.commit()
    lake.publish(50)
    options = {"startingOffsets": json.dumps({"main": position})}
    before = rows(read(spark, lake, **options))
    assert len(before) == 51
    lake.archive()
    drop(lake)
    assert lake.dropped() == [0]
    assert rows(read(spark, lake, **options)) == before


def test_a_stream_from_earliest_hands_over_while_the_border_moves(
    spark: SparkSession, three: Lake, tmp_path: Path
) -> None:
    three.archive()
    drop(three, keep=1)
    expected = {row[0] for row in three.stored()}
    seen: list[int] = []
    for round_number in range(4):
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
    assert len(three.dropped()) >= 3
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
