"""A driver program that does what it is asked, one thing after another, by files in its folder `asked`.

`N.ask` holds [verb, arguments], `N.answer` what came of it: {"answer": ...} or {"error": ...}.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.taskcontext import TaskContext

Flow = dict[str, Any]
"""A query: its name, checkpoint, options to read the log; then a folder of Parquet or options to write."""

_running: dict[str, StreamingQuery] = {}


def warm(spark: SparkSession) -> None:
    """Has both executors start, with Python in them."""
    spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").count()


def publish(
    spark: SparkSession,
    *,
    options: dict[str, str],
    rows: int,
    partitions: int,
    trouble: dict[str, Any] | None = None,
) -> None:
    """Publishes the numbers below `rows` by a plain job of so many tasks."""
    numbers = spark.range(0, rows, 1, partitions)
    _troubled(_events(numbers), trouble).write.format("pgmb").options(**options).mode("append").save()


def follow_files(
    spark: SparkSession,
    *,
    options: dict[str, str],
    files: str,
    checkpoint: str,
    partitions: int,
    trouble: dict[str, Any] | None = None,
) -> None:
    """Publishes what lies in a folder of Parquet by a streaming query that ends when all is done."""
    numbers = spark.readStream.schema("id long").parquet(files).repartition(partitions)
    writer = _troubled(_events(numbers), trouble).writeStream.format("pgmb").options(**options)
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def copy(spark: SparkSession, *, read: dict[str, str], folder: str) -> None:
    """Reads all there is, as a batch, into Parquet."""
    spark.read.format("pgmb").options(**read).load().write.parquet(folder)


def start(spark: SparkSession, *, flows: list[Flow]) -> None:
    """Starts queries that go on, those of them that do not run yet."""
    for flow in flows:
        if (query := _running.get(flow["name"])) is not None and query.isActive:
            continue
        _running[flow["name"]] = _query(spark, flow).trigger(processingTime="0 seconds").start()


def drain(spark: SparkSession, *, flows: list[Flow]) -> None:
    """Stops the queries, then runs each of them to the end of what there is, in their order."""
    for flow in flows:
        if (query := _running.pop(flow["name"], None)) is not None:
            if (failure := query.exception()) is not None:
                raise failure
            query.stop()
    for flow in flows:
        _query(spark, flow).trigger(availableNow=True).start().awaitTermination()


def check(spark: SparkSession) -> None:
    """Raises what a running query ended with."""
    for query in _running.values():
        if (failure := query.exception()) is not None:
            raise failure


def _query(spark: SparkSession, flow: Flow) -> DataStreamWriter:
    events = spark.readStream.format("pgmb").options(**flow["read"]).load()
    if "parquet" in flow:
        writer = events.writeStream.format("parquet").option("path", flow["parquet"])
    else:
        # What it came from is told by the payload: the first event's, and its number there.
        again = events.select("topic", "key", "payload", events.seq.cast("string").alias("origin"))
        again = again.select(
            "topic", "key", functions.to_json(functions.struct("payload", "origin")).alias("payload")
        )
        writer = again.writeStream.format("pgmb").options(**flow["write"])
    return writer.option("checkpointLocation", flow["checkpoint"]).queryName(flow["name"])


def _events(numbers: DataFrame) -> DataFrame:
    key = functions.concat(functions.lit("key-"), (numbers.id % 7).cast("string"))
    return numbers.select(key.alias("key"), numbers.id.cast("string").alias("payload"))


def _troubled(events: DataFrame, trouble: dict[str, Any] | None) -> DataFrame:
    """Has one task give all its rows and then, on its first attempts, linger for a while, or fail."""
    if trouble is None:
        return events

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == trouble["task"] and context.attemptNumber() < trouble["attempts"]:
            time.sleep(trouble["linger"])
            if trouble["fail"]:
                raise RuntimeError("a task that was asked to fail")

    return events.mapInArrow(pass_on, events.schema)


VERBS: dict[str, Callable[..., None]] = {
    "warm": warm,
    "publish": publish,
    "follow_files": follow_files,
    "copy": copy,
    "start": start,
    "drain": drain,
    "check": check,
}


def main() -> None:
    folder = Path("asked")
    folder.mkdir(exist_ok=True)
    parent = os.getppid()
    spark = SparkSession.builder.getOrCreate()
    for number in itertools.count():
        asked = folder / f"{number}.ask"
        while not asked.exists():
            if os.getppid() != parent:
                return
            time.sleep(0.02)
        verb, arguments = json.loads(asked.read_text())
        answer: dict[str, Any]
        try:
            answer = {"answer": VERBS[verb](spark, **arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        written = folder / f"{number}.written"
        written.write_text(json.dumps(answer))
        written.rename(folder / f"{number}.answer")


if __name__ == "__main__":
    main()
