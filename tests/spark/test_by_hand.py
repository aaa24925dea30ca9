"""What the reader of a stream decides by itself, asked as Spark asks it, without a JVM."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pyspark.sql.types import StructType

from harness.databases import create_database, drop_database
from harness.server import Server
from pgmb.errors import Conflict
from pgmb.spark import connections
from pgmb.spark.frames import decode
from pgmb.spark.options import ReadOptions, WriteOptions
from pgmb.spark.source.readers import StreamReader
from tests.spark.stored import ByHand, planned, read_seqs

DB = psycopg.Connection[Any]


def publish(db: DB, numbers: range, payload: str = "to_json(n)") -> None:
    db.execute(
        f"select pgmb.publish('t', {payload}) from generate_series(%s::int, %s::int) n",
        [numbers.start, numbers.stop - 1],
    )


Streaming = Callable[..., StreamReader]


@pytest.fixture
def streaming(dsn: str) -> Iterator[Streaming]:
    """Makes readers of a stream, from its earliest event on, and stops them."""
    with ExitStack() as stack:

        def make(**options: str) -> StreamReader:
            given = {"url": dsn, "startingOffsets": "earliest", **options}
            made = StreamReader(given, StructType().add("seq", "long"))
            stack.callback(made.stop)
            return made

        yield make


def next_offset(reader: StreamReader, start: dict[str, Any]) -> dict[str, Any]:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


def test_all_that_was_read_is_confirmed_when_spark_asks_for_more(streaming: Streaming, db: DB) -> None:
    """Spark's own commit comes with the next batch, which on a quiet stream may take days."""
    publish(db, range(10))
    reader = streaming(readerName="r")
    end = next_offset(reader, reader.initialOffset())
    waiting = "select waiting from pgmb.reader_status"
    assert db.execute(waiting).fetchall() == [(10,)]
    assert next_offset(reader, end) == end
    assert db.execute(waiting).fetchall() == [(0,)]


def test_two_queries_with_one_reader_name_are_told(streaming: Streaming, db: DB) -> None:
    """The one ahead would have retention drop what the other has not read."""
    one, other = streaming(readerName="r"), streaming(readerName="r")
    begun = one.initialOffset()
    publish(db, range(10))
    at = next_offset(one, begun)
    next_offset(one, at)
    other.initialOffset()
    publish(db, range(10))
    with pytest.raises(Conflict, match="reader 'r' of stream 'main' was moved by another"):
        next_offset(one, next_offset(one, at))
    # One that is started again takes its place over.
    again = streaming(readerName="r")
    next_offset(again, next_offset(again, at))


def test_an_idle_query_asks_less_and_less_often(
    streaming: Streaming, db: DB, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's default trigger asks again after 10 ms."""
    pauses: list[float] = []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("pgmb.spark.source.readers.time", clock)
    reader = streaming()
    at = next_offset(reader, reader.initialOffset())
    for _ in range(10):
        assert next_offset(reader, at) == at
    assert pauses[:2] == [0, 0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.25
    publish(db, range(1))
    at = next_offset(reader, at)
    next_offset(reader, at)
    assert pauses[-1] == 0, "while events come it does not wait"


@pytest.mark.parametrize("ending", ["earliest", "soon", "Latest"])
def test_where_a_read_ends_is_latest_or_offsets(ending: str) -> None:
    with pytest.raises(ValueError, match=f"endingOffsets must be latest or JSON, got '{ending}'"):
        ReadOptions.of({"url": "host=nowhere", "endingOffsets": ending}, streaming=False)


def test_a_read_from_a_time_ends_at_the_offsets_it_is_given(dsn: str, db: DB) -> None:
    publish(db, range(5))
    ((position,),) = db.execute("select pgmb.position()::text").fetchall()
    publish(db, range(5, 9))
    given = {"url": dsn, "startingTimestamp": "2020-01-01", "endingOffsets": json.dumps({"main": position})}
    assert len(read_seqs(**given)) == 5


def test_a_database_that_is_added_is_read_from_its_earliest_event(
    dsn: str, db: DB, server: Server, template: str
) -> None:
    """Wherever the query began: what it has of the others it has read since then, and of this one nothing."""
    other = create_database(server, template)
    try:
        query = ByHand(url=dsn, startingOffsets="latest")
        publish(db, range(3))
        assert query.drain() == []
        publish(db, range(3, 5))
        with server.connect(other) as second:
            publish(second, range(100, 104))
        query.drain(url=f"{dsn}\n{server.dsn(other)}")
        assert sorted(query.payloads()) == [3, 4, 100, 101, 102, 103]
    finally:
        drop_database(server, other)


def test_partitions_are_bounded_in_bytes(dsn: str, db: DB, streaming: Streaming) -> None:
    """Payloads of random text: compressed ones count as what they unpack to."""
    publish(db, range(64), "to_json(repeat(md5(n::text), 1000))")
    assert planned(url=dsn) == 1
    assert planned(url=dsn, maxRecordsPerPartition=16) == 4
    # 64 events of 32 kB.
    assert 7 <= planned(url=dsn, maxBytesPerPartition=256 << 10) <= 10
    reader = streaming(maxBytesPerPartition=str(256 << 10))
    begun = reader.initialOffset()
    assert 7 <= len(reader.partitions(begun, next_offset(reader, begun))) <= 10


def test_of_two_limits_of_a_batch_the_smaller_one_counts(dsn: str, db: DB) -> None:
    publish(db, range(40), "to_json(repeat('x', 1000))")
    assert max(ByHand(url=dsn, maxEventsPerTrigger=30).drain()) == 30
    both = ByHand(url=dsn, maxEventsPerTrigger=30, maxBytesPerTrigger=10_500).drain()
    assert max(both) <= 10
    assert sum(both) == 40
    assert max(ByHand(url=dsn, maxEventsPerTrigger=5, maxBytesPerTrigger=10_500).drain()) == 5


def test_events_that_are_left_out_for_having_been_dropped_are_logged(
    dsn: str, db: DB, caplog: pytest.LogCaptureFixture
) -> None:
    query = ByHand(url=dsn, failOnDataLoss="false")
    publish(db, range(2))
    query.drain()
    assert caplog.messages == []
    publish(db, range(2, 4))
    for step in ("rotate()", "seal()", "alter_stream('main', keep_for => '0 s')", "drop_segments()"):
        db.execute(f"select pgmb.{step}")
    assert db.execute("select from pgmb.segment where dropped_at is not null").fetchall()
    publish(db, range(4, 6))
    with caplog.at_level(logging.WARNING, "pgmb.spark"):
        query.drain()
    assert query.payloads() == [0, 1, 4, 5]
    (message,) = caplog.messages
    assert "were dropped by retention; the query goes on with what is left" in message


def test_a_task_says_who_it_is(dsn: str) -> None:
    with connections.transaction(dsn) as cursor:
        cursor.execute("select current_setting('application_name')")
        assert cursor.fetchone() == ("pgmb spark",)


def test_without_a_url_the_environment_names_the_database(
    dsn: str, db: DB, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(db, range(3))
    monkeypatch.setenv("PGMB_DSN", dsn)
    assert len(read_seqs()) == 3
    assert WriteOptions.of({}, streaming=False).url == dsn
    monkeypatch.delenv("PGMB_DSN")
    with pytest.raises(ValueError, match=r"or PGMB_DSN"):
        read_seqs()


def test_how_malformed_payloads_are_treated_is_one_of_four() -> None:
    frame: Any = None
    with pytest.raises(ValueError, match="malformed must be null, rescue, fail, drop, got 'bogus'"):
        decode(frame, "n int", malformed="bogus")  # type: ignore[arg-type]
