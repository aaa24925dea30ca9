"""Reading: what Spark gets is what pgmb.between gives, in batches that partition the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.spark.stored import ByHand, planned, read_seqs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(300)]

COLUMNS = ["id", "stream", "topic", "key", "payload", "headers", "published_at", "seq", "position"]


def publish(db: psycopg.Connection[Any], events: int, topic: str = "t") -> None:
    db.execute(
        "insert into pgmb.log_main (topic, key, payload, headers)"
        " select %s || '.' || g %% 3, nullif('k' || g %% 5, 'k0'), json_build_object('n', g),"
        " case when g %% 2 = 0 then '{\"h\": 1}'::json end from generate_series(1, %s) g",
        [topic, events],
    )


def everything(db: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return db.execute(
        "select e.id::text, 'main', e.topic, e.key, e.payload::text, e.headers::text, e.published_at, e.seq"
        " from pgmb.between('main', pgmb.earliest(), pgmb.position(), 0, 1000000) e"
    ).fetchall()


def table(spark: SparkSession, dsn: str, **options: Any) -> DataFrame:
    return spark.read.format("pgmb").options(url=dsn, **options).load()


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    found = frame.selectExpr(*COLUMNS[:6], "unix_micros(published_at) at", "seq").collect()
    return sorted((tuple(row) for row in found), key=lambda row: row[-1])


def micros(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*row[:6], round(row[6].timestamp() * 1_000_000), row[7]) for row in found]


def test_a_table_is_what_between_gives(spark: SparkSession, db: psycopg.Connection[Any], dsn: str) -> None:
    publish(db, 200)
    db.execute("select pgmb.publish('given', '\"é\\ud83d\\ude00\"', id => gen_random_uuid())")
    found = table(spark, dsn, maxRecordsPerPartition=60)
    assert rows(found) == micros(everything(db))
    assert found.schema.fieldNames() == COLUMNS
    assert planned(url=dsn, maxRecordsPerPartition=60) == 4
    assert planned(url=dsn, minPartitions=3) == 3


def test_only_the_columns_of_the_schema_are_read(
    spark: SparkSession, db: psycopg.Connection[Any], dsn: str
) -> None:
    publish(db, 10)
    reader = spark.read.format("pgmb").option("url", dsn)
    found = reader.schema("topic STRING, seq BIGINT").load().collect()
    assert [(row.topic, row.seq) for row in found] == [(f"t.{n % 3}", n) for n in range(1, 11)]
    with pytest.raises(Exception, match="an event has no column nonsense"):
        reader.schema("nonsense STRING").load().collect()


def stream(spark: SparkSession, dsn: str, to: Path, **options: Any) -> Any:
    return (
        spark.readStream.format("pgmb")
        .options(url=dsn, startingOffsets="earliest", **options)
        .load()
        .writeStream.format("parquet")
        .option("path", str(to / "out"))
        .option("checkpointLocation", str(to / "checkpoint"))
    )


def drain(spark: SparkSession, dsn: str, to: Path, **options: Any) -> Any:
    query = stream(spark, dsn, to, **options).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def test_a_stream_gives_each_event_once_across_late_commits_and_restarts(
    spark: SparkSession, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    publish(db, 10)
    with psycopg.connect(dsn) as late, psycopg.connect(dsn) as never:
        publish(late, 5, "late")
        publish(never, 5, "never")
        publish(db, 10)
        first = drain(spark, dsn, tmp_path, maxEventsPerTrigger=12)
        assert max(p["numInputRows"] for p in first.recentProgress) <= 12
        assert sum(p["numInputRows"] for p in first.recentProgress) == 20
        late.commit()
        never.rollback()
    publish(db, 3)
    drain(spark, dsn, tmp_path)
    found = spark.read.parquet(str(tmp_path / "out"))
    assert rows(found) == micros(everything(db))


def test_an_idle_stream_runs_no_batches(
    spark: SparkSession, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    publish(db, 10)
    query = stream(spark, dsn, tmp_path).start()
    try:
        query.processAllAvailable()
        batch = query.lastProgress["batchId"]
        db.execute("create table other (n int)")
        for n in range(20):
            db.execute("insert into other values (%s)", [n])
        query.processAllAvailable()
        assert query.lastProgress["batchId"] <= batch + 1
        offsets = sorted((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"))
        assert len(offsets) == 1
        assert json.loads(offsets[0].read_text().splitlines()[-1])["stream"] == "main"
    finally:
        query.stop()


def test_several_databases_are_read_as_one(
    spark: SparkSession, db: psycopg.Connection[Any], dsn: str, server: Any, template: str
) -> None:
    from harness.databases import create_database, drop_database
    from pgmb.spark import read

    other = create_database(server, template)
    try:
        with server.connect(other) as second:
            publish(db, 30)
            publish(second, 20, "second")
            second.commit()
            both = [dsn, server.dsn(other)]
            assert len(read(spark, both).select("seq").collect()) == 50
            query = ByHand(url="\n".join(both))
            assert max(query.drain(maxEventsPerTrigger=24)) <= 24
            publish(second, 5, "second")
            second.commit()
            assert sum(query.drain()) == 5
        assert len(query.rows) == len({id for id, _, _ in query.rows}) == 55
        with pytest.raises(ValueError, match="the checkpoint stands in"):
            query.drain(url=dsn)
    finally:
        drop_database(server, other)


def test_topics_and_times_choose_events(db: psycopg.Connection[Any], dsn: str) -> None:
    publish(db, 30, "a")
    publish(db, 30, "b")
    ((middle,),) = db.execute("select min(published_at) from pgmb.log_main where topic like 'b.%'").fetchall()
    assert len(read_seqs(url=dsn, subscribe="a.*, b.0")) == 40
    assert len(read_seqs(url=dsn, subscribePattern="^[ab]\\.1$")) == 20
    assert read_seqs(url=dsn, startingTimestamp=middle.isoformat()) == [*range(31, 61)]
    assert read_seqs(url=dsn, endingTimestamp=middle.isoformat()) == [*range(1, 31)]


def test_filters_are_pushed_down(spark: SparkSession, db: psycopg.Connection[Any], dsn: str) -> None:
    publish(db, 30, "a")
    publish(db, 30, "b")
    ((middle,),) = db.execute("select min(published_at) from pgmb.log_main where topic like 'b.%'").fetchall()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        for condition, events in (
            ("topic = 'a.1' and key is not null and seq <= 20", 6),
            ("topic in ('a.1', 'b.2') or upper(key) = 'K1'", 28),
            (f"published_at >= timestamp'{middle.isoformat()}'", 30),
            ("topic like 'a.%' and not (key = 'k1')", 18),
        ):
            assert len(table(spark, dsn).where(condition).select("seq").collect()) == events, condition
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_payloads_are_decoded(spark: SparkSession, db: psycopg.Connection[Any], dsn: str) -> None:
    from pgmb.spark import decode, read

    db.execute(
        "select pgmb.publish('t', p::json) from unnest(%s::text[]) p", [['{"n": 1}', '{"n": "x"}', "[1]"]]
    )
    by_number = read(spark, dsn, schema="n INT").orderBy("seq").select("payload.n").collect()
    assert [row.n for row in by_number] == [1, None, None]
    assert [row.payload.n for row in read(spark, dsn, schema="n INT", malformed="drop").collect()] == [1]
    with pytest.raises(Exception, match=r"MALFORMED|FAILFAST"):
        read(spark, dsn, schema="n INT", malformed="fail").collect()
    variant = decode(read(spark, dsn), "variant").selectExpr("variant_get(payload, '$.n', 'string') n")
    assert sorted(str(row.n) for row in variant.collect()) == ["1", "None", "x"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": ""}, "needs .option"),
        ({"maxEvents": "1"}, "did you mean maxEventsPerTrigger"),
        ({"stream": "nowhere"}, "nowhere"),
        ({"startingOffsets": "soon"}, "earliest, latest or JSON"),
        ({"startingOffsets": "{"}, "earliest, latest or JSON"),
        ({"startingTimestamp": "noon"}, "startingTimestamp must be a time"),
        ({"subscribe": "a*b"}, "invalid pattern"),
        ({"minPartitions": "0"}, "above 0"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"readUrl": "host=a\nhost=b"}, "readUrl names 2"),
    ],
)
def test_nonsense_is_refused_with_a_reason(options: dict[str, str], told: str, dsn: str) -> None:
    from pyspark.sql.types import StructType

    from pgmb.errors import PgmbError
    from pgmb.spark.source.readers import BatchReader

    schema = StructType().add("topic", "string")
    with pytest.raises((ValueError, PgmbError), match=told):
        BatchReader({"url": dsn, **options}, schema).partitions()
