"""What a query says of itself: Spark's progress has our offsets, and the log a line a batch."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark.errors import StreamingQueryException

import pgmb
from harness.spark import TOO_SLOW
from pgmb.spark.progress import line, log_progress
from pgmb.spark.source.offsets import Offset, ShardOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import SourceProgress, StreamingQueryProgress

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(300)]


def position(seq: int) -> str:
    return f'(1,7,5,9,"90:90:",{seq},90)'


def offset(*marks: ShardOffset) -> str:
    return json.dumps(Offset("main", {f"7/{number}": mark for number, mark in enumerate(marks)}).dump())


def told(end: str | None, latest: str | None, rows: int = 10) -> str | None:
    progress = SimpleNamespace(name=None, id="q", batchId=3)
    rate = 1234.5 if rows else float("nan")
    source = SimpleNamespace(
        endOffset=end, latestOffset=latest, numInputRows=rows, processedRowsPerSecond=rate
    )
    return line(cast("StreamingQueryProgress", progress), cast("SourceProgress", source))


def test_a_line_names_the_position_and_what_is_left() -> None:
    at = position(100)
    said = told(offset(ShardOffset(at)), offset(ShardOffset(position(150))))
    assert said == f"query q, batch 3: 10 events of stream main, 1,234 per second, up to {at}, 50 left"
    assert str(told(offset(ShardOffset(at)), offset(ShardOffset(at)), rows=0)).endswith(
        f" 0 per second, up to {at}, 0 left"
    )


def test_a_cut_batch_several_shards_and_a_segment_further() -> None:
    cut = ShardOffset(position(0), to_position=position(100), seq=40)
    said = told(
        offset(cut, ShardOffset(position(7))), offset(ShardOffset(position(150)), ShardOffset(position(9)))
    )
    assert str(said).endswith(f"up to {position(100)}, {position(7)}, 112 left")
    assert str(told(offset(cut), offset(ShardOffset(position((1 << 40) + 5))))).endswith("more than 5 left")


@pytest.mark.parametrize(
    "end", [None, "", "null", "12", '"x"', "[1]", "{}", '{"v": 1}', '{"topic": {"0": 5}}', "{"]
)
def test_other_sources_are_left_alone(end: str | None) -> None:
    assert told(end, None) is None


def test_a_query_is_logged(
    spark: SparkSession, dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgmb.spark")
    with pgmb.connect(dsn) as broker:
        broker.publish_many("t", range(30))
    listener = log_progress(spark)
    try:
        events: Any = (
            spark.readStream.format("pgmb")
            .options(url=dsn, startingOffsets="earliest", maxEventsPerTrigger=20, readerName="logged")
            .load()
        )
        writer = (
            events.writeStream.format("noop")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName("logged")
            .trigger(availableNow=True)
        )
        while True:
            query = writer.start()
            with contextlib.suppress(StreamingQueryException):
                query.awaitTermination()
            failure = query.exception()
            if failure is None or TOO_SLOW not in str(failure):
                break
        assert failure is None, failure
        # Listeners are told a little later than the query ends.
        deadline = time.monotonic() + 60
        while len(caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        spark.streams.removeListener(listener)
    first, second = caplog.messages[:2]
    assert first.startswith("query logged, batch 0: 20 events of stream main")
    assert first.endswith(" 10 left")
    assert second.startswith("query logged, batch 1: 10 events of stream main")
    assert second.endswith(" 0 left")
    (source,) = query.recentProgress[0].sources
    assert all(json.loads(one)["stream"] == "main" for one in (source.endOffset, source.latestOffset))
    with pgmb.connect(dsn) as broker:
        (reader,) = broker.reader_status()
    # Confirmed when the next batch was planned: the first one.
    assert reader.reader == "logged"
