"""What an executor does: read one part of a batch, as Arrow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql

from pgmb.errors import HistoryGone, ReaderBehind
from pgmb.spark.source.log import ON_DATA_LOSS
from pgmb.spark.source.offsets import Part
from pgmb.spark.source.statement import columns_for, select
from pgmb.types import Position

if TYPE_CHECKING:
    import pyarrow as pa

# Large enough for a batch to be worth its overhead, small enough for a handful of them to fit in any worker.
_BATCH_BYTES: Final = 16 * 1024 * 1024
# The walk by number: no plan made for a table that was never analyzed, or analyzed when it was empty.
_SETTINGS: Final = (
    "select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', {}, true),"
    " set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true)"
)


class Reading(msgspec.Struct, frozen=True):
    """One part of a batch, with all that is needed to read it.

    asked   what else the WHERE clause asks of an event e
    """

    url: str
    stream: str
    salt: int
    after: Position
    upto: Position
    part: Part
    asked: str
    fail_on_data_loss: bool
    replica_timeout: float


def read(reading: Reading, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The events of a part, in the order of their numbers. Raises at its end if retention took of them."""
    until = time.monotonic() + reading.replica_timeout
    while True:
        try:
            yield from _attempt(reading, schema)
        except ReaderBehind:
            # Raised before the first event: a replica that has not come so far yet.
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _attempt(reading: Reading, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Here, because they take a while, and the processes in which Spark plans need neither.
    from pgmb.spark.connections import transaction
    from pgmb.spark.source.rows import Rows

    part = reading.part
    columns = columns_for(schema.names)
    rows = Rows(schema, reading.stream, str(reading.upto), reading.salt)
    statement = select(reading.stream, columns, reading.after, reading.upto, part, reading.asked)
    with transaction(reading.url) as cursor:
        _ask(cursor, _SETTINGS.format("'on'" if part.late else "'off'"))
        _ask(cursor, _assert_between(reading))
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
        cursor.execute(statement)
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield rows.of(batch)
        if reading.fail_on_data_loss:
            try:
                _ask(cursor, _assert_between(reading, f", {part.lo}, {part.hi}"))
            except HistoryGone as gone:
                gone.add_note(ON_DATA_LOSS)
                raise


def _assert_between(reading: Reading, bounds: str = "") -> str:
    stream, after, upto = (
        sql.Literal(str(given)).as_string() for given in (reading.stream, reading.after, reading.upto)
    )
    return f"select pgmb.assert_between({stream}, {after}::pgmb.position, {upto}::pgmb.position{bounds})"


def _ask(cursor: Any, statement: str) -> None:
    cursor.execute(statement)
    cursor.fetchall()
