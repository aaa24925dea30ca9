"""What an executor does: read one partition of a batch, as Arrow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from psycopg import sql

from pgmb.errors import HistoryGone, ReaderBehind
from pgmb.spark.source.offsets import SEGMENT_BITS, SeqRange
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
    " set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true),"
    " set_config('pgmb.read_lake', {}, true)"
)


class LakeOptions(msgspec.Struct, frozen=True):
    """How events are chosen that are read from the lake: by conditions on the topic of `e`, and times in
    microseconds. `options` open the storage."""

    topics: str
    since: int | None
    until: int | None
    options: dict[str, str]


class PartitionRead(msgspec.Struct, frozen=True):
    """One partition of a batch: everything that an executor needs to read it.

    condition   further conditions on an event `e`, for the WHERE clause
    lake        None: only the log is read
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
    lake: LakeOptions | None = None


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
    rows = Rows(schema, partition.stream, str(partition.upto), partition.salt)
    with transaction(partition.url, reached=True) as cursor:
        lake = "'off'" if partition.lake is None else "'on'"
        _ask(cursor, _SETTINGS.format("'on'" if seqs.late else "'off'", lake))
        _ask(cursor, _assert_between(partition))
        read = _both_tiers if partition.lake is not None else _log_alone
        for batch in read(partition, cursor, columns_for(schema.names)):
            if batch.num_rows:
                yield rows.of(batch)
        if partition.fail_on_data_loss:
            try:
                _ask(cursor, _assert_between(partition, f", {seqs.lo}, {seqs.hi}"))
            except HistoryGone as gone:
                gone.add_note(ON_DATA_LOSS)
                raise


def _log_alone(partition: PartitionRead, cursor: Any, columns: list[str]) -> Iterator[Any]:
    return _from_log(partition, cursor, columns, partition.range)


def _both_tiers(partition: PartitionRead, cursor: Any, columns: list[str]) -> Iterator[Any]:
    """What is archived from the lake, the rest from the log, in the order of seq."""
    seqs = partition.range
    held = _lake_segments(cursor, partition, seqs)
    # Segment by segment where the lake has one of them; otherwise all of the log's at once.
    first, last = seqs.lo >> SEGMENT_BITS, seqs.hi >> SEGMENT_BITS
    for part in [_part(seqs, number) for number in range(first, last + 1)] if held else [seqs]:
        found = held.get(part.hi >> SEGMENT_BITS) if held else None
        if found is not None:
            yield from _from_lake(partition, cursor, part, found)
            continue
        yield from _from_log(partition, cursor, columns, part)
        # This transaction has held the segments since it began to read them. Those that are dropped now were
        # dropped before, and the log gave nothing of them.
        for number, found in _lake_segments(cursor, partition, part).items():
            if found.dropped:
                yield from _from_lake(partition, cursor, _part(part, number), found)


def _part(seqs: SeqRange, number: int) -> SeqRange:
    """What of a range lies in a segment."""
    lo, hi = (number << SEGMENT_BITS) - 1, ((number + 1) << SEGMENT_BITS) - 1
    return SeqRange(max(seqs.lo, lo), min(seqs.hi, hi), seqs.late)


def _from_log(partition: PartitionRead, cursor: Any, columns: list[str], seqs: SeqRange) -> Iterator[Any]:
    cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
    cursor.execute(
        select(partition.stream, columns, partition.after, partition.upto, seqs, partition.condition)
    )
    yield from cursor.fetch_record_batch()


def _from_lake(partition: PartitionRead, cursor: Any, seqs: SeqRange, segment: _LakeSegment) -> Iterator[Any]:
    given = partition.lake
    if given is None:
        return
    try:
        from pgmb.lake.read import LakeEvents, LakeRange
    except ImportError as error:
        error.add_note('These events are in the lake. Install what reads it: pip install "pgmb[lake]".')
        raise

    def matches(topics: list[str]) -> set[str]:
        listed = sql.Literal(topics).as_string()
        cursor.execute(f"select e.topic from unnest({listed}::text[]) e (topic) where true{given.topics}")
        return {topic for (topic,) in cursor.fetchall()}

    events = LakeEvents(
        partition.after,
        partition.upto,
        since=given.since,
        until=given.until,
        matches=matches if given.topics else None,
        options=given.options,
    )
    yield from events.read(LakeRange(segment.url, seqs.lo, seqs.hi, segment.current))


class _LakeSegment(NamedTuple):
    """An archived segment: its table, whether the log dropped it, whether its xids are of this epoch."""

    url: str
    dropped: bool
    current: bool


def _lake_segments(cursor: Any, partition: PartitionRead, seqs: SeqRange) -> dict[int, _LakeSegment]:
    stream = sql.Literal(partition.stream).as_string()
    cursor.execute(
        f"select segment, url, dropped, current from pgmb.lake_segments({stream}, {seqs.lo}, {seqs.hi})"
    )
    return {number: _LakeSegment(*found) for number, *found in cursor.fetchall()}


def _assert_between(partition: PartitionRead, bounds: str = "") -> str:
    stream, after, upto = (
        sql.Literal(str(given)).as_string() for given in (partition.stream, partition.after, partition.upto)
    )
    return f"select pgmb.assert_between({stream}, {after}::pgmb.position, {upto}::pgmb.position{bounds})"


def _ask(cursor: Any, statement: str) -> None:
    cursor.execute(statement)
    cursor.fetchall()
