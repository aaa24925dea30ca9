"""What a task does: write a range of the log to files, or read files back. Runs in Spark's Python workers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from psycopg import sql

from pgmb.lake.digest import Block, BlockDigests
from pgmb.lake.events import COLUMNS, EVENTS, FILE_SCHEMA, ROW_GROUP, Layout, LogRows
from pgmb.lake.storage import Storage

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute
pq: Any = pyarrow.parquet

_BATCH_BYTES: Final = 16 * 1024 * 1024
# A row group has fewer rows if they are large: it is held in memory as a whole.
_GROUP_BYTES: Final = 128 * 1024 * 1024
# Forces the index scan by seq, whatever the statistics of the table say.
_SETTINGS: Final = (
    "select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),"
    " set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true),"
    # A part takes as long as it takes; who set a limit had other statements in mind.
    " set_config('statement_timeout', '0', true)"
)
_DAY: Final = timedelta(days=1)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_END: Final = datetime(9999, 12, 31, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST: Final = 1 << 62


class Part(msgspec.Struct, frozen=True):
    """A range of the log for one task to write: all events with lo < seq <= hi, which must be sealed."""

    url: str
    stream: str
    salt: int
    storage: Storage
    lo: int
    hi: int
    file_bytes: int


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that a task wrote. Bounds are those of its layout's statistics."""

    path: str
    date: str
    bytes: int
    rows: int
    lowest: dict[str, Any]
    highest: dict[str, Any]
    written_at: int


class FileGroup(msgspec.Struct, frozen=True):
    """Files to read back in the order of seq: those whose blocks of events overlap."""

    storage: Storage
    salt: int
    paths: list[str]


class GroupRead(msgspec.Struct, frozen=True):
    """What was found in a group of files. `fault` says why it could not be read."""

    blocks: list[Block]
    fault: str | None = None


# -- Write ---------------------------------------------------------------------------------------------------


def write_part(part: Part) -> list[WrittenFile]:
    """Write a part of the log: a file for each date, and more than one if it would grow too large.

    The names are new in each attempt: files of an attempt whose result is not committed belong to no table.
    """
    # Imported here: readers of files need neither Spark nor ADBC.
    from pgmb.spark.connections import transaction

    rows = LogRows(part.salt)
    log = sql.Identifier("pgmb", f"log_{part.stream}").as_string()
    writers: dict[int, DateWriter] = {}
    with transaction(part.url, reached=True) as cursor:
        cursor.execute(_SETTINGS)
        cursor.fetchall()
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
        cursor.execute(
            f"select {COLUMNS} from {log} e where e.seq > {part.lo} and e.seq <= {part.hi} order by e.seq"
        )
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                for day, events in by_day(rows.of(batch), EVENTS.at):
                    if day not in writers:
                        writers[day] = DateWriter(part.storage, EVENTS, day, part.lo + 1, part.file_bytes)
                    writers[day].add(events)
    return [file for day in sorted(writers) for file in writers[day].finish()]


def by_day(events: Any, at: str) -> Iterator[tuple[int, Any]]:
    """Events by the days of a column of times in UTC, counted from 1970."""
    days = pc.cast(pc.cast(events.column(at), pa.date32()), pa.int32())
    bounds = pc.min_max(days).as_py()
    if bounds["min"] == bounds["max"]:
        yield bounds["min"], events
        return
    for day in sorted(pc.unique(days).to_pylist()):
        yield day, events.filter(pc.equal(days, day))


class DateWriter:
    """Writes events of one date to files of about `file_bytes`. `first`: the number of the first of them."""

    def __init__(self, storage: Storage, layout: Layout, day: int, first: int, file_bytes: int) -> None:
        self._storage, self._files, self._layout = storage, storage.files(), layout
        self._first, self._file_bytes = first, file_bytes
        self.date = (_EPOCH + day * _DAY).date().isoformat()
        self._written: list[WrittenFile] = []
        self._waiting: list[Any] = []
        self._rows = self._bytes = 0
        self._path = ""
        self._sink: Any = None
        self._writer: Any = None
        self._bounds: list[dict[str, Any]] = []

    def add(self, events: Any) -> None:
        self._waiting.append(events)
        self._rows += events.num_rows
        self._bytes += events.nbytes
        while self._rows >= ROW_GROUP or self._bytes >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> list[WrittenFile]:
        if self._rows:
            self._write_group()
        self._close()
        return self._written

    def _write_group(self) -> None:
        waiting = pa.Table.from_batches(self._waiting, schema=self._layout.schema)
        group = waiting.slice(0, ROW_GROUP)
        rest = waiting.slice(ROW_GROUP)
        self._waiting = rest.to_batches()
        self._rows, self._bytes = rest.num_rows, rest.nbytes
        writer = self._writer or self._open()
        writer.write_table(group, row_group_size=ROW_GROUP)
        self._bounds.append(
            {
                "rows": group.num_rows,
                **{name: pc.min_max(group.column(name)) for name in self._layout.statistics},
            }
        )
        if self._sink.tell() >= self._file_bytes:
            self._close()

    def _open(self) -> Any:
        self._path = f"{self._layout.partition}={self.date}/{self._first}-{uuid.uuid4()}.parquet"
        self._storage.make_folder(self._path)
        self._sink = self._files.open_output_stream(self._path)
        self._writer = pq.ParquetWriter(self._sink, self._layout.schema, **self._layout.writing)
        return self._writer

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        size = self._sink.tell()
        self._sink.close()
        self._storage.flush(self._path)
        self._written.append(
            WrittenFile(
                path=self._path,
                date=self.date,
                bytes=size,
                rows=sum(bounds["rows"] for bounds in self._bounds),
                lowest={
                    name: min(plain(bounds[name]["min"]) for bounds in self._bounds)
                    for name in self._layout.statistics
                },
                highest={
                    name: max(plain(bounds[name]["max"]) for bounds in self._bounds)
                    for name in self._layout.statistics
                },
                written_at=time.time_ns() // 1_000_000,
            )
        )
        self._writer = self._sink = None
        self._bounds = []


def plain(value: Any) -> Any:
    """A bound as the log of a table writes it."""
    found = value.as_py()
    return (
        found.isoformat(timespec="microseconds").replace("+00:00", "Z")
        if isinstance(found, datetime)
        else found
    )


# -- Read back -----------------------------------------------------------------------------------------------


class DamagedError(Exception):
    """A file that is missing or cannot be read."""


def read_group(group: FileGroup) -> GroupRead:
    """Read files and digest what they hold. A file that is missing or damaged is a fault, not an error."""
    digests = BlockDigests(group.salt)
    files = group.storage.files()
    try:
        for events in in_order(files, group.paths):
            digests.add(events)
    except DamagedError as damaged:
        return GroupRead([], str(damaged))
    return GroupRead(digests.blocks())


class Bounds(NamedTuple):
    """Which row groups to read: those that may have an event with lo < seq <= hi, of a transaction within
    these bounds, published at `since` (microseconds) or later."""

    lo: int = -1
    hi: int = _LAST
    lowest_xid: int = 0
    highest_xid: int = _LAST
    since: int = -_LAST


def in_order(files: Any, paths: list[str], bounds: Bounds | None = None) -> Iterator[Any]:
    """The events of files in the order of seq; row groups that cannot have one within bounds are left out.

    Raises DamagedError if a file is missing or cannot be read.
    """
    return _merged([_events_of(files, path, bounds or Bounds()) for path in paths])


def _events_of(files: Any, path: str, bounds: Bounds) -> Iterator[Any]:
    """The events of a file, in batches that fit into memory whatever their size."""
    try:
        with files.open_input_file(path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            if file.schema_arrow.names != FILE_SCHEMA.names:
                raise DamagedError(f"{path}: has other columns")
            described = file.metadata
            groups = [n for n in range(described.num_row_groups) if _overlaps(described.row_group(n), bounds)]
            size = sum(described.row_group(n).total_byte_size for n in groups)
            rows = _BATCH_BYTES * 4 * sum(described.row_group(n).num_rows for n in groups) // max(size, 1)
            for events in file.iter_batches(batch_size=max(64, min(65536, rows)), row_groups=groups):
                if events.num_rows:
                    yield events
    except (OSError, pa.ArrowException) as error:
        raise DamagedError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def _overlaps(group: Any, asked: Bounds) -> bool:
    def reaches(column: str, lowest: Any, highest: Any) -> bool:
        known = group.column(FILE_SCHEMA.get_field_index(column)).statistics
        return known is None or not known.has_min_max or (known.max >= lowest and known.min <= highest)

    return (
        reaches("seq", asked.lo + 1, asked.hi)
        and reaches("xid", asked.lowest_xid, asked.highest_xid)
        and (asked.since == -_LAST or reaches("published_at", _EPOCH + asked.since * _MICROSECOND, _END))
    )


class _Head:
    """A stream of events with the batch that comes next; None at its end."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream = stream
        self.batch: Any = next(stream, None)

    def take(self, bound: int) -> Any:
        """The events of the batch up to a seq."""
        count = pc.sum(pc.less_equal(self.batch.column("seq"), bound)).as_py() or 0
        taken = self.batch.slice(0, count)
        self.batch = self.batch.slice(count) if count < self.batch.num_rows else next(self._stream, None)
        return taken


def _merged(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """Events of several files in the order of seq. Each file is in that order."""
    heads = [_Head(stream) for stream in streams]
    while heads := [head for head in heads if head.batch is not None]:
        # What lies up to the smallest last seq of all is complete.
        bound = min(head.batch.column("seq")[-1].as_py() for head in heads)
        ready = [taken for taken in (head.take(bound) for head in heads) if taken.num_rows]
        if len(ready) == 1:
            yield ready[0]
        else:
            yield from pa.Table.from_batches(ready).sort_by("seq").combine_chunks().to_batches()
