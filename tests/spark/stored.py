"""What a stream gives: to a checkpointed query that stores it as Parquet, and to readers without a JVM."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from faults.spark import files
from harness.spark import TOO_SLOW
from pgmb.spark.source.readers import BatchReader, StreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class Stored:
    """One checkpoint and one folder of Parquet."""

    def __init__(self, spark: SparkSession, folder: Path, **options: Any) -> None:
        self._spark = spark
        self._folder = folder
        self._options = {"startingOffsets": "earliest", **options}

    def drain(self, **options: Any) -> None:
        """Stores all that there is now. Raises what the query fails with."""
        self._begun(lambda: self._query(options).trigger(availableNow=True).start()).awaitTermination()

    def start(self, every: str = "0 seconds", **options: Any) -> StreamingQuery:
        return self._begun(lambda: self._query(options).trigger(processingTime=every).start())

    def payloads(self) -> list[int]:
        return [int(payload) for _, (payload,) in files.rows(self._folder / "out", "payload")]

    def _begun(self, start: Callable[[], StreamingQuery]) -> StreamingQuery:
        """A query that is under way, or failed with more than Spark's impatience: then it is begun again."""
        while True:
            query = start()
            while query.isActive and query.lastProgress is None:
                time.sleep(0.02)
            if (failure := query.exception()) is None or TOO_SLOW not in str(failure):
                return query

    def _query(self, options: dict[str, Any]) -> DataStreamWriter:
        events = self._spark.readStream.format("pgmb").options(**{**self._options, **options}).load()
        writer = events.writeStream.format("parquet").option("path", str(self._folder / "out"))
        return writer.option("checkpointLocation", str(self._folder / "checkpoint"))


class ByHand:
    """Calls the reader of a stream as Spark does, without a JVM: for what the reader alone decides."""

    def __init__(self, **options: Any) -> None:
        self._options = {"startingOffsets": "earliest", **options}
        self._checkpoint: str | None = None
        self.rows: list[tuple[Any, ...]] = []
        """id, seq and payload of what was stored."""

    def drain(self, **options: Any) -> list[int]:
        """Stores all that there is now, batch by batch: their sizes. Raises what the reader fails with."""
        given = {name: str(value) for name, value in {**self._options, **options}.items()}
        reader = StreamReader(given, _schema("id", "seq", "payload"))
        sizes: list[int] = []
        try:
            at = reader.initialOffset() if self._checkpoint is None else json.loads(self._checkpoint)
            self._checkpoint = json.dumps(at)
            reader.prepareForTriggerAvailableNow()
            while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
                batch = _read(reader, reader.partitions(at, end))
                sizes.append(len(batch))
                self.rows += batch
                at, self._checkpoint = end, json.dumps(end)
        finally:
            reader.stop()
        return sizes

    def payloads(self) -> list[int]:
        return [int(payload) for _, _, payload in self.rows]


def planned(**options: Any) -> int:
    """The number of partitions of a batch read."""
    return len(_batch(options, "seq").partitions())


def read_seqs(**options: Any) -> list[int]:
    """The events of a batch read, by number."""
    reader = _batch(options, "seq")
    return sorted(seq for (seq,) in _read(reader, reader.partitions()))


def _batch(options: dict[str, Any], *columns: str) -> BatchReader:
    return BatchReader({name: str(value) for name, value in options.items()}, _schema(*columns))


def _schema(*columns: str) -> StructType:
    schema = StructType()
    for name in columns:
        schema.add(name, "string")
    return schema


def _read(reader: BatchReader | StreamReader, partitions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As tasks do, which get their partitions pickled."""
    found: list[tuple[Any, ...]] = []
    for part in pickle.loads(pickle.dumps(list(partitions))):
        for batch in reader.read(part):
            found += zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return found
