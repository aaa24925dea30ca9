"""Writes by Spark itself: batches and queries, what is repeated, what fails, what is left."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Connection = psycopg.Connection[Any]


def numbers(spark: SparkSession, rows: int, tasks: int) -> DataFrame:
    return spark.range(0, rows, 1, tasks).select(
        f.lit("n").alias("topic"),
        (f.col("id") % 3).alias("key"),
        f.struct(f.col("id").alias("n")).alias("payload"),
    )


def write(rows: DataFrame, dsn: str, **options: str) -> None:
    rows.write.format("pgmb").options(url=dsn, **options).mode("append").save()


def published(db: Connection) -> list[int]:
    rows = db.execute("select (payload ->> 'n')::int from pgmb.log_main order by seq").fetchall()
    return [row[0] for row in rows]


def stages_held(db: Connection) -> int:
    row = db.execute("select count(*) from pgmb.stage where app is not null").fetchone()
    assert row is not None
    return int(row[0])


def run(
    spark: SparkSession, source: Path, checkpoint: Path, dsn: str, tasks: int, files: int = 1, **options: str
) -> str:
    """A query over the files of a directory, so many a batch, to its end: its id."""
    rows = (
        spark.readStream.schema("n long")
        .option("maxFilesPerTrigger", files)
        .json(str(source))
        .repartition(tasks, "n")
        .select(f.lit("n").alias("topic"), f.struct("n").alias("payload"))
    )
    query = (
        rows.writeStream.format("pgmb")
        .options(url=dsn, checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return str(query.id)


def test_a_batch_is_published_in_order_once_a_version(spark: SparkSession, dsn: str, db: Connection) -> None:
    for _ in range(2):
        write(numbers(spark, 100, 3), dsn, txnAppId="job", txnVersion="1")
    assert published(db) == list(range(100))
    assert db.execute("select key from pgmb.log_main order by seq limit 4").fetchall() == [
        ("0",),
        ("1",),
        ("2",),
        ("0",),
    ]
    assert db.execute("select app, version, events from pgmb.ledger").fetchall() == [("job", 1, 100)]
    assert stages_held(db) == 0
    # Without a name each is its own, and nothing of it stays.
    write(numbers(spark, 0, 2), dsn)
    write(numbers(spark, 10, 2), dsn, commitMode="direct")
    assert len(published(db)) == 110
    assert db.execute("select count(*) from pgmb.ledger").fetchall() == [(1,)]


def test_what_fails_publishes_nothing_and_holds_nothing(
    spark: SparkSession, dsn: str, db: Connection
) -> None:
    rows = numbers(spark, 100, 2).withColumn("payload", f.expr("if(payload.n = 99, '{n', '{\"n\": 1}')"))
    with pytest.raises(PySparkException, match=r"invalid input syntax for type json.*\{n"):
        write(rows, dsn)
    assert published(db) == []
    deadline = time.monotonic() + 60
    while stages_held(db):
        assert time.monotonic() < deadline
        # Of a task that was told to end and was done before it heard: maintain() frees it.
        db.execute("select pgmb.clear_stages('0 s')")
    with pytest.raises(PySparkException, match="only ever appended to"):
        numbers(spark, 1, 1).write.format("pgmb").options(url=dsn).mode("overwrite").save()
    with pytest.raises(PySparkException, match="stream 'nowhere' does not exist"):
        write(numbers(spark, 1, 1), dsn, stream="nowhere")


def test_a_query_publishes_each_batch_once_whatever_is_repeated(
    spark: SparkSession, dsn: str, db: Connection, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()

    def arrive(name: int) -> None:
        (source / f"{name}.json").write_text("".join(f'{{"n": {name * 10 + row}}}\n' for row in range(10)))

    arrive(0)
    arrive(1)
    app = run(spark, source, checkpoint, dsn, tasks=2)
    assert sorted(published(db)) == list(range(20))
    assert db.execute("select app, version from pgmb.ledger").fetchall() == [(app, 1)]
    # The driver dies after the sink's commit and before Spark's own; then the batch is cut otherwise.
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    arrive(2)
    assert run(spark, source, checkpoint, dsn, tasks=3) == app
    assert sorted(published(db)) == list(range(30))
    assert stages_held(db) == 0
    assert db.execute("select version, events from pgmb.ledger").fetchall() == [(2, 10)]


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_an_older_checkpoint_loses_nothing_in_silence(
    spark: SparkSession, dsn: str, db: Connection, tmp_path: Path, mode: str
) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    copies: list[Path] = []
    for batch in range(4):
        (source / f"{batch}.json").write_text("".join(f'{{"n": {batch * 10 + row}}}\n' for row in range(10)))
        run(spark, source, checkpoint, dsn, tasks=2, commitMode=mode)
        copies.append(tmp_path / f"after {batch}")
        shutil.copytree(checkpoint, copies[-1])
    (source / "4.json").write_text('{"n": 40}\n')
    # The batches are cut as before: they publish nothing, and the query goes on behind them.
    run(spark, source, copies[0], dsn, tasks=2, commitMode=mode)
    assert sorted(published(db)) == list(range(41))
    # Now the number of the last batch is given to more events.
    (source / "5.json").write_text('{"n": 50}\n')
    with pytest.raises(PySparkException, match="cannot be published: it was published already with"):
        run(spark, source, copies[2], dsn, tasks=2, files=9, commitMode=mode)
    assert sorted(published(db)) == list(range(41))
    assert stages_held(db) == 0


def test_a_batch_write_under_a_used_version_is_compared(
    spark: SparkSession, dsn: str, db: Connection
) -> None:
    named = {"txnAppId": "job", "txnVersion": "1"}
    write(numbers(spark, 10, 2), dsn, **named)
    write(numbers(spark, 10, 3), dsn, **named)
    with pytest.raises(PySparkException, match="published already with 10 events, and now it holds 11"):
        write(numbers(spark, 11, 2), dsn, **named)
    write(numbers(spark, 11, 2), dsn, repeatedBatches="skip", **named)
    assert published(db) == list(range(10))
    with pytest.raises(PySparkException, match="needs exactly-once writes"):
        write(numbers(spark, 1, 1), dsn, repeatedBatches="skip", commitMode="direct")


def test_a_direct_write_that_died_midway_is_finished_if_it_is_cut_alike(
    spark: SparkSession, dsn: str, db: Connection, tmp_path: Path
) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    broken = str(flag)

    def fragile(number: int) -> int:
        if number == 19 and Path(broken).exists():
            # Once the other task is done, that there is something to repeat.
            with psycopg.connect(dsn, autocommit=True) as connection:
                deadline = time.monotonic() + 60
                while connection.execute("select from pgmb.ledger_task").fetchone() is None:
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    time.sleep(0.05)
            raise RuntimeError("broken")
        return number

    def rows(tasks: int) -> DataFrame:
        passing = f.udf(lambda number: fragile(number), "long")  # noqa: PLW0108 # Spark would look at hints.
        made = spark.range(0, 20, 1, tasks).select(passing("id").alias("n"))
        return made.select(f.lit("n").alias("topic"), f.struct("n").alias("payload"))

    options = {"commitMode": "direct", "txnAppId": "job", "txnVersion": "7"}
    with pytest.raises(PySparkException, match="broken"):
        write(rows(2), dsn, **options)
    assert published(db) == list(range(10))
    flag.unlink()
    with pytest.raises(PySparkException, match=r"task 0 published 10 events, and now it holds 6.* has 3 now"):
        write(rows(3), dsn, **options)
    assert published(db) == list(range(10))
    assert stages_held(db) == 0
    write(rows(2), dsn, **options)
    assert published(db) == list(range(20))
    assert Counter(published(db)).most_common(1)[0][1] == 1
