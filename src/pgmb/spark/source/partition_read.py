"""What an executor does: read one partition of a batch, as Arrow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql

from pgmb.errors import HistoryGone, ReaderBehind
from pgmb.spark.source.offsets import SeqRange
from pgmb.spark.source.queries import columns_for, select
from pgmb.spark.source.shards import ON_DATA_LOSS
from pgmb.types import Position

if TYPE_CHECKING:
    import pyarrow as pa

# Large enough to amortize the overhead per batch, small enough to fit several times into any worker.
_BATCH_BYTES: Final = 16 * 1024 * 1024
# Forces the index scan by seq, whatever the statistics of the table say.
_SETTINGS: Final = (
    "select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', {}, true),"
    " set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true)"
)


class PartitionRead(msgspec.Struct, frozen=True):
    """One partition of a batch: everything that an executor needs to read it.

    condition   further conditions on an event `e`, for the WHERE clause
    """

    url: str
    stream: str
    salt: int
    after: Position
    upto: Position
    range: SeqRange
    condition: str
    fail_on_data_loss: bool
    replica_timeout: float


def read_partition(partition: PartitionRead, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The events of a partition, by seq. Raises HistoryGone at the end if retention dropped some of them."""
    until = time.monotonic() + partition.replica_timeout
    while True:
        try:
            yield from _attempt(partition, schema)
        except ReaderBehind:
            # Raised before the first event: a replica that lags behind.
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _attempt(partition: PartitionRead, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    # Imported here because they are slow, and the driver's planning processes do not need them.
    from pgmb.spark.connections import transaction
    from pgmb.spark.source.rows import Rows

    seqs = partition.range
    columns = columns_for(schema.names)
    rows = Rows(schema, partition.stream, str(partition.upto), partition.salt)
    statement = select(partition.stream, columns, partition.after, partition.upto, seqs, partition.condition)
    with transaction(partition.url, reached=True) as cursor:
        _ask(cursor, _SETTINGS.format("'on'" if seqs.late else "'off'"))
        _ask(cursor, _assert_between(partition))
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
        cursor.execute(statement)
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield rows.of(batch)
        if partition.fail_on_data_loss:
            try:
                _ask(cursor, _assert_between(partition, f", {seqs.lo}, {seqs.hi}"))
            except HistoryGone as gone:
                gone.add_note(ON_DATA_LOSS)
                raise


def _assert_between(partition: PartitionRead, bounds: str = "") -> str:
    stream, after, upto = (
        sql.Literal(str(given)).as_string() for given in (partition.stream, partition.after, partition.upto)
    )
    return f"select pgmb.assert_between({stream}, {after}::pgmb.position, {upto}::pgmb.position{bounds})"


def _ask(cursor: Any, statement: str) -> None:
    cursor.execute(statement)
    cursor.fetchall()
