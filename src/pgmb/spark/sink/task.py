"""What one task does with its rows. Each attempt of a task runs this in a Python worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import WriterCommitMessage

from pgmb.spark.connections import transaction
from pgmb.spark.sink.columns import Columns
from pgmb.spark.sink.digests import Digest
from pgmb.spark.sink.event_ids import EventIds
from pgmb.spark.sink.options import WriteOptions
from pgmb.spark.sink.outgoing import Outgoing
from pgmb.spark.sink.refusals import refusals

_BEGIN = "select pgmb.begin_tasks($1, $2, $3, $4::uuid)"
_CLAIM_TASK = "select pgmb.claim_task($1, $2, $3, $4::int, $5::uuid)"
_FINISH_TASK = "select pgmb.finish_task($1, $2, $3, $4::int, $5, $6)::text"
_CLAIM_STAGE = "select pgmb.claim_stage($1, $2, $3::bigint)"
_PUBLISH_STAGE = "select pgmb.publish_stage($1, $2::int, $3, $4::bigint, $5, true)"


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver.

    stage    holds its events until they are published; None if there are none, or they are published
    digest   of events that were published directly
    """

    app: str
    version: int | None
    task: int
    events: int = 0
    stage: int | None = None
    digest: int | None = None


@dataclass(frozen=True)
class Task:
    """One task of a version of an application. `run` tells attempts at a whole version apart."""

    options: WriteOptions
    columns: Columns
    app: str
    version: int | None
    number: int
    run: str

    def write(self, batches: Iterator[Any]) -> Written:
        """Publish the rows, or see to it that the driver can."""
        with refusals():
            if self.options.mode == "staged":
                return self._staged(batches)
            if self.options.mode == "direct":
                return self._direct(batches)
            return self._at_least_once(batches)

    def _staged(self, batches: Iterator[Any]) -> Written:
        """Write into a stage, which the driver publishes together with those of all tasks."""
        out = Outgoing(batches, self.columns)
        if out.empty:
            return self._written()
        with transaction(self.options.url) as cursor:
            stage = self._ask(cursor, _CLAIM_STAGE)
            if stage is not None:
                _write(cursor, f"stage_{stage}", out)
        if stage is None:
            out.drain()
            return self._written()
        return self._written(events=out.events, stage=stage)

    def _direct(self, batches: Iterator[Any]) -> Written:
        """Publish in a transaction that also says that this task did."""
        digest = Digest()
        out = Outgoing(batches, self.columns, digest)
        if out.empty:
            return self._written(digest=digest.value)
        with transaction(self.options.url) as cursor:
            how = self._ask(cursor, _BEGIN, self.run)
        if how == "direct":
            self._publish(out, digest)
        stage = self._stage_missing(out) if how == "staged" else None
        out.drain()
        if stage is not None:
            return self._written(events=out.events, stage=stage)
        return self._written(events=out.events, digest=digest.value)

    def _publish(self, out: Outgoing, digest: Digest) -> None:
        with transaction(self.options.url) as cursor:
            if self._ask(cursor, _CLAIM_TASK, self.number, self.run):
                self._write_to_log(cursor, out)
                self._ask(cursor, _FINISH_TASK, self.number, out.events, digest.value)

    def _stage_missing(self, out: Outgoing) -> int | None:
        """Write into a stage what an earlier run has not published; the driver compares the rest."""
        with transaction(self.options.url) as cursor:
            if self._ask(cursor, "select pgmb.task_published($1, $2, $3, $4::int)", self.number):
                return None
            stage: int | None = self._ask(cursor, _CLAIM_STAGE)
            if stage is not None:
                _write(cursor, f"stage_{stage}", out)
            return stage

    def _at_least_once(self, batches: Iterator[Any]) -> Written:
        """Publish, again whenever the task is repeated, with the same ids."""
        ids = () if self.columns.identified else (EventIds(self.app, self.version, self.number),)
        out = Outgoing(batches, self.columns, *ids)
        if not out.empty:
            with transaction(self.options.url) as cursor:
                ask(cursor, "select pgmb.stream_id($1)", self.options.stream)
                self._write_to_log(cursor, out)
        return self._written(events=out.events)

    def _write_to_log(self, cursor: Any, out: Outgoing) -> None:
        if self.columns.delayed:
            # The log takes no due time: what is due later waits elsewhere.
            stage = self._ask(cursor, "select pgmb.claim_stage($1, $2)", version=False)
            _write(cursor, f"stage_{stage}", out)
            ask(cursor, _PUBLISH_STAGE, self.options.stream, stage, self.app, None, out.events)
        else:
            _write(cursor, f"log_{self.options.stream}", out)

    def _ask(self, cursor: Any, statement: str, *parameters: Any, version: bool = True) -> Any:
        told = (self.options.stream, self.app, *([self.version] if version else []))
        return ask(cursor, statement, *told, *parameters)

    def _written(self, **told: Any) -> Written:
        return Written(app=self.app, version=self.version, task=self.number, **told)


def _write(cursor: Any, table: str, out: Outgoing) -> None:
    try:
        cursor.adbc_ingest(table, out.stream(), mode="append", db_schema_name="pgmb")
    except Exception:
        out.raise_own()
        raise


def ask(cursor: Any, statement: str, *parameters: Any) -> Any:
    """The one value that a statement returns."""
    cursor.execute(statement, parameters)
    return cursor.fetchone()[0]
