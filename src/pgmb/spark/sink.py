"""Writing: `df.write.format("pgmb")` and `df.writeStream.format("pgmb")`, exactly once by default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

import psycopg
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from pgmb.errors import translated
from pgmb.spark.columns import Columns
from pgmb.spark.task import Task, Written
from pgmb.spark.write_options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

_PUBLISH = "select pgmb.publish_tasks(%s, %s, %s, %s::int[], %s::int[], %s::bigint[], %s::bigint[], %s)"
_ABANDON = "select pgmb.abandon_tasks(%s, %s, %s, %s)"


class _Sink:
    """What both writers do. Made at the driver, copied to every task."""

    def __init__(
        self, options: Mapping[str, str], schema: StructType, overwrite: bool, streaming: bool
    ) -> None:
        if overwrite:
            raise ValueError(
                'a log is only ever appended to: use mode("append"), or outputMode("append" or "update")'
            )
        self.options = WriteOptions.of(options, streaming)
        self.columns = Columns(schema, self.options)
        self.run: UUID = uuid4()

    def task(self, app: str, version: int | None, batches: Iterator[Any]) -> Written:
        context = cast("TaskContext", TaskContext.get())
        task = Task(self.options, self.columns, app, version, context.partitionId(), self.run)
        return task.staged(batches)

    def publish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        told = _told(messages)
        if not told:
            return
        tasks, stages, events, digests = zip(
            *((m.task, m.stage, m.events, m.digest) for m in told), strict=True
        )
        app, version = told[0].app, told[0].version
        with psycopg.connect(self.options.url, autocommit=True) as connection, translated():
            connection.execute(
                _PUBLISH,
                (
                    self.options.stream,
                    app,
                    version,
                    [*tasks],
                    [*stages],
                    [*events],
                    [*digests],
                    self.columns.delayed,
                ),
            )

    def abandon(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        told = _told(messages)
        if told:
            with psycopg.connect(self.options.url, autocommit=True) as connection, translated():
                connection.execute(_ABANDON, (self.options.stream, told[0].app, told[0].version, False))


class BatchWriter(_Sink, DataSourceArrowWriter):
    """A write of a whole DataFrame: published once by txnAppId and txnVersion, if they are given."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=False)
        self.app = self.options.app or str(uuid4())

    def write(self, iterator: Iterator[Any]) -> Written:
        return self.task(self.app, self.options.version, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.abandon(messages)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """A write of a streaming query, each of whose batches is published once: its version is its number, the
    application the query, or txnAppId."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[Any]) -> Written:
        context = cast("TaskContext", TaskContext.get())
        app = self.options.app or context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if app is None or batch is None:
            raise RuntimeError("Spark told this task neither the streaming query nor the batch it belongs to")
        return self.task(app, int(batch), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.abandon(messages)


def _told(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    """The messages of tasks that were done, in the tasks' order."""
    return sorted((m for m in messages if isinstance(m, Written)), key=lambda written: written.task)
