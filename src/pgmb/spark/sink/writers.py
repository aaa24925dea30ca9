"""Writing: `df.write.format("pgmb")` and `df.writeStream.format("pgmb")`, exactly once by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from logging import getLogger
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from adbc_driver_manager import Error
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from pgmb.errors import PgmbError
from pgmb.spark.connections import transaction
from pgmb.spark.options import WriteOptions
from pgmb.spark.sink.columns import Columns
from pgmb.spark.sink.task import Task, TaskResult, ask

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

_logger = getLogger("pgmb.spark")

_PUBLISH = (
    "select pgmb.publish_tasks($1, $2, $3::bigint, $4::text::int[], $5::text::int[], $6::text::bigint[],"
    " $7::text::bigint[], $8)"
)
_ABANDON = "select pgmb.abandon_tasks($1, $2, $3::bigint, $4)"


class _Sink:
    """Common to both writers. Created on the driver and copied to every task."""

    def __init__(
        self, options: Mapping[str, str], schema: StructType, overwrite: bool, streaming: bool
    ) -> None:
        if overwrite:
            raise ValueError(
                'a log is only ever appended to: use mode("append"), or outputMode("append" or "update")'
            )
        self.options = WriteOptions.of(options, streaming)
        self.columns = Columns(schema, self.options)
        self.run = str(uuid4())

    def task(
        self, app: str, version: int | None, batches: Iterator[Any], *, reached: bool = False
    ) -> TaskResult:
        context = cast("TaskContext", TaskContext.get())
        task = Task(self.options, self.columns, app, version, context.partitionId(), self.run, reached)
        return task.write(batches)

    def publish(self, messages: Sequence[WriterCommitMessage | None], *, forget: bool = False) -> None:
        """Publish the tasks' events and update the ledger, in one transaction.

        Raises TasksDiffer if the version was published with other events, as from an older checkpoint.
        """
        results = _results(messages)
        if not results or self.options.mode == "at-least-once":
            return
        app, version = results[0].app, results[0].version
        arrays = [
            _array(getattr(result, name) for result in results)
            for name in ("task", "stage", "events", "digest")
        ]
        # The tasks have reached it.
        with transaction(self.options.url, reached=True) as cursor:
            ask(cursor, _PUBLISH, self.options.stream, app, version, *arrays, self.columns.delayed)
            if forget:
                ask(cursor, _ABANDON, self.options.stream, app, version, True)

    def abandon(self, app: str, version: int | None, forget: bool = False) -> None:
        """Drop the tasks' stages after a failure. Errors are only logged: they would hide the failure."""
        if self.options.mode != "at-least-once":
            try:
                with transaction(self.options.url) as cursor:
                    ask(cursor, _ABANDON, self.options.stream, app, version, forget)
            except (PgmbError, Error) as error:
                _logger.warning("stages of application %s are left to pgmb.maintain(): %s", app, error)


class BatchWriter(_Sink, DataSourceArrowWriter):
    """A batch write. With txnAppId and txnVersion, each version is published once.

    Without them, the write is an application of its own, which is removed from the ledger at the end. It is
    needed there in commitMode=direct, because Spark may repeat tasks.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=False)
        self.app = self.options.app or str(uuid4())
        self.forget = self.options.app is None and self.options.mode == "direct"
        self.version = 0 if self.forget else self.options.version

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        return self.task(self.app, self.version, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.publish(messages, forget=self.forget)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.abandon(self.app, self.version, self.forget)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """A streaming write. Each batch is published once.

    The version is the batch's number; the application is the query, or txnAppId.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[Any]) -> TaskResult:
        context = cast("TaskContext", TaskContext.get())
        app = self.options.app or context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if app is None or batch is None:
            raise RuntimeError(
                "Spark tells this task neither the streaming query nor the batch it belongs to"
            )
        # A query whose first batch was published has reached the database.
        return self.task(app, int(batch), iterator, reached=int(batch) > 0)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        results = _results(messages)
        if results:
            self.abandon(results[0].app, results[0].version)


def _results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """The results of finished tasks, by task number."""
    return sorted((m for m in messages if isinstance(m, TaskResult)), key=lambda result: result.task)


def _array(values: Iterable[int | None]) -> str:
    """A PostgreSQL array literal."""
    return "{" + ",".join("null" if value is None else str(value) for value in values) + "}"
