"""What one task does with its rows. Each attempt of a task runs this in a Python worker of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pyspark.sql.datasource import WriterCommitMessage

from pgmb.spark.columns import Columns
from pgmb.spark.connections import transaction
from pgmb.spark.outgoing import Outgoing
from pgmb.spark.refusals import refusals
from pgmb.spark.write_options import WriteOptions


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
    run: UUID

    def staged(self, batches: Iterator[Any]) -> Written:
        """Write into a stage, which the driver publishes together with those of all tasks."""
        out = Outgoing(batches, self.columns)
        if out.empty:
            return self._written()
        with refusals(), transaction(self.options.url) as cursor:
            stage = _value(
                cursor, "select pgmb.claim_stage($1, $2, $3)", self.options.stream, self.app, self.version
            )
            if stage is not None:
                _write(cursor, f"stage_{stage}", out)
        if stage is None:
            out.drain()
            return self._written()
        return self._written(events=out.events, stage=stage)

    def _written(self, **told: Any) -> Written:
        return Written(app=self.app, version=self.version, task=self.number, **told)


def _write(cursor: Any, table: str, out: Outgoing) -> None:
    try:
        cursor.adbc_ingest(table, out.stream(), mode="append", db_schema_name="pgmb")
    except Exception:
        out.raise_own()
        raise


def _value(cursor: Any, statement: str, *parameters: Any) -> Any:
    cursor.execute(statement, parameters)
    return cursor.fetchone()[0]
