"""A checkpointed query that stores a stream as Parquet, and what it has stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.spark import files
from harness.spark import TOO_SLOW

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

    def start(self, **options: Any) -> StreamingQuery:
        return self._begun(lambda: self._query(options).trigger(processingTime="0 seconds").start())

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
