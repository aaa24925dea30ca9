"""Spark as what runs the tasks of the lake: each in a Python worker, and only its result comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class SparkRun:
    """Runs tasks on a session's executors. Those of a cluster need `pgmb[lake]` and access to the storage."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.parallelism = spark.sparkContext.defaultParallelism

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Sequence[_Task], result: type[_Result]
    ) -> list[_Result]:
        if not tasks:
            return []
        given = list(tasks)

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                numbers: list[int] = batch.column(0).to_pylist()
                done = [msgspec.msgpack.encode(work(given[number])) for number in numbers]
                yield pa.RecordBatch.from_arrays(
                    [pa.array(numbers, pa.int64()), pa.array(done, pa.binary())], ["task", "result"]
                )

        # A partition for each task, with its number.
        numbers = self._spark.range(0, len(given), 1, len(given))
        rows = numbers.mapInArrow(run, "task bigint, result binary").collect()
        return [
            msgspec.msgpack.decode(row.result, type=result) for row in sorted(rows, key=lambda row: row.task)
        ]
