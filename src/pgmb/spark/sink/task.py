"""One task of a write. Each attempt of a task runs this in a Python worker."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from adbc_driver_manager import Error
from pyspark.sql.datasource import WriterCommitMessage

from pgmb.errors import InvalidArgument
from pgmb.spark.connections import diagnosis, transaction
from pgmb.spark.options import WriteOptions
from pgmb.spark.sink.columns import Columns
from pgmb.spark.sink.events import Digest, EventBatches, EventIds

_BEGIN = "select pgmb.begin_tasks($1, $2, $3, $4::uuid)"
_CLAIM_TASK = "select pgmb.claim_task($1, $2, $3, $4::int, $5::uuid)"
_FINISH_TASK = "select pgmb.finish_task($1, $2, $3, $4::int, $5, $6)::text"
_CLAIM_STAGE = "select pgmb.claim_stage($1, $2, $3::bigint)"
_PUBLISH_STAGE = "select pgmb.publish_stage($1, $2::int, $3, $4::bigint, $5, true)"


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The result of a task, for the driver.

    stage    the stage with its events; None if there are no events, or they are published already
    digest   of the events, if the write has a version
    """

    app: str
    version: int | None
    task: int
    events: int = 0
    stage: int | None = None
    digest: int | None = None


@dataclass(frozen=True)
class Task:
    """One task of a version of an application. `run` identifies an attempt at the whole version.

    reached   whether the database was reached before, so that it is waited for if it is away
    """

    options: WriteOptions
    columns: Columns
    app: str
    version: int | None
    number: int
    run: str
    reached: bool = False

    def write(self, batches: Iterator[Any]) -> TaskResult:
        """Publish the rows, or stage them for the driver to publish."""
        with data_errors():
            if self.options.mode == "staged":
                return self._staged(batches)
            if self.options.mode == "direct":
                return self._direct(batches)
            return self._at_least_once(batches)

    def _staged(self, batches: Iterator[Any]) -> TaskResult:
        """Write into a stage. The driver publishes the stages of all tasks in one transaction."""
        # A version that comes again is compared with what was published. Without a version, none does.
        digest = Digest() if self.version is not None and self.options.compares else None
        out = EventBatches(batches, self.columns, *([] if digest is None else [digest]))
        if not out.empty:
            with self._transaction() as cursor:
                stage = self._ask(cursor, _CLAIM_STAGE)
                if stage is not None:
                    _write(cursor, f"stage_{stage}", out)
            out.drain()
        else:
            stage = None
        return self._written(events=out.events, stage=stage, digest=None if digest is None else digest.value)

    def _direct(self, batches: Iterator[Any]) -> TaskResult:
        """Publish, and record the task as published, in one transaction."""
        digest = Digest()
        out = EventBatches(batches, self.columns, digest)
        if out.empty:
            return self._written(digest=digest.value)
        with self._transaction() as cursor:
            how = self._ask(cursor, _BEGIN, self.run)
        if how == "direct":
            self._publish(out, digest)
        stage = self._stage_missing(out) if how == "staged" else None
        out.drain()
        return self._written(events=out.events, stage=stage, digest=digest.value)

    def _publish(self, out: EventBatches, digest: Digest) -> None:
        with self._transaction() as cursor:
            if self._ask(cursor, _CLAIM_TASK, self.number, self.run):
                self._write_to_log(cursor, out)
                self._ask(cursor, _FINISH_TASK, self.number, out.events, digest.value)

    def _stage_missing(self, out: EventBatches) -> int | None:
        """Stage a task that no earlier run published. The driver compares the digests of the others."""
        with self._transaction() as cursor:
            if self._ask(cursor, "select pgmb.task_published($1, $2, $3, $4::int)", self.number):
                return None
            stage: int | None = self._ask(cursor, _CLAIM_STAGE)
            if stage is not None:
                _write(cursor, f"stage_{stage}", out)
            return stage

    def _at_least_once(self, batches: Iterator[Any]) -> TaskResult:
        """Publish. A repeated task publishes again, with the same ids."""
        ids = () if self.columns.identified else (EventIds(self.app, self.version, self.number),)
        out = EventBatches(batches, self.columns, *ids)
        if not out.empty:
            with self._transaction() as cursor:
                ask(cursor, "select pgmb.stream_id($1)", self.options.stream)
                self._write_to_log(cursor, out)
        return self._written(events=out.events)

    def _write_to_log(self, cursor: Any, out: EventBatches) -> None:
        if self.columns.delayed:
            # The log has no due time: delayed events go through a stage.
            stage = self._ask(cursor, "select pgmb.claim_stage($1, $2)", version=False)
            _write(cursor, f"stage_{stage}", out)
            ask(cursor, _PUBLISH_STAGE, self.options.stream, stage, self.app, None, out.events)
        else:
            _write(cursor, f"log_{self.options.stream}", out)

    def _transaction(self) -> AbstractContextManager[Any]:
        return transaction(self.options.url, reached=self.reached)

    def _ask(self, cursor: Any, statement: str, *parameters: Any, version: bool = True) -> Any:
        told = (self.options.stream, self.app, *([self.version] if version else []))
        return ask(cursor, statement, *told, *parameters)

    def _written(self, **told: Any) -> TaskResult:
        return TaskResult(app=self.app, version=self.version, task=self.number, **told)


def _write(cursor: Any, table: str, out: EventBatches) -> None:
    try:
        cursor.adbc_ingest(table, out.stream(), mode="append", db_schema_name="pgmb")
    except Exception:
        out.raise_own()
        raise


def ask(cursor: Any, statement: str, *parameters: Any) -> Any:
    """The single value of a statement."""
    cursor.execute(statement, parameters)
    return cursor.fetchone()[0]


_INVALID_JSON = "22P02"
_INVALID_TEXT = "22021"
_LONGEST_CONTEXT = 300


@contextmanager
def data_errors() -> Generator[None]:
    """Raise ADBC errors about invalid data as InvalidArgument."""
    try:
        yield
    except Error as error:
        said = diagnosis(error)
        message, place = said.get("MESSAGE_PRIMARY", str(error)), said.get("CONTEXT", "").replace("\n", "; ")
        if error.sqlstate == _INVALID_JSON:
            detail = said.get("MESSAGE_DETAIL", "")
            ours = InvalidArgument(f"{message}: {detail} {place[:_LONGEST_CONTEXT]}")
            ours.advise("A payload or headers of type STRING are JSON text, such as to_json makes.")
            raise ours from error
        if error.sqlstate == _INVALID_TEXT:
            wrong = (
                "topics and keys cannot hold the character NUL"
                if message.endswith(": 0x00")
                else "strings of events must be UTF-8"
            )
            raise InvalidArgument(f"{wrong}: {message}; {place[:_LONGEST_CONTEXT]}") from error
        raise
