"""Dead letters to a table of their own, each exactly once: plan → write → commit → verify → record.

The database plans a batch: a number, and the count and digest of dead letters as they are at that moment. The
number is the version of the commit, so a batch that was committed is never written again, and one that was
not is followed by another plan. There are few: this process does the work, without Spark.
"""

from __future__ import annotations

import hashlib
import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import psycopg
import pyarrow
import pyarrow.parquet
from psycopg.rows import class_row

from pgmb._core.connecting import session
from pgmb.errors import ForeignTable, VerificationFailed
from pgmb.lake.delta import KnownFile, LakeTable, own_path
from pgmb.lake.storage import Storage
from pgmb.lake.task import WrittenFile

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

_TIME: Final = pa.timestamp("us", tz="UTC")
_FILE_SCHEMA: Final = pa.schema(
    [
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("queue", pa.string(), nullable=False),
        pa.field("died_at", _TIME, nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("event_id", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("payload", pa.string(), nullable=False),
        pa.field("headers", pa.string()),
        pa.field("published_at", _TIME, nullable=False),
        pa.field("endpoint", pa.string()),
    ]
)
_DEATH: Final = ["id", "queue", "endpoint", "died_at", "published_at", "error"]
_KINDS: Final = {_TIME: 1184, pa.int64(): 20, pa.int32(): 23, pa.string(): 25}
"""The types of PostgreSQL, as record_send() writes them."""
_OIDS: Final = [_KINDS[field.type] for field in _FILE_SCHEMA][1:]
_PLAN: Final = (
    "select batch, id, queue, died_at, attempt, error, seq, event_id, topic, key, payload, headers,"
    " published_at, endpoint from pgmb.plan_dead(%s, %s, empty => %s)"
)
_BATCH_LETTERS: Final = 50_000
_DEAD_LAKE: Final = "select url, source, verified, planned from pgmb.dead_lake_of(%s)"
_RECORD: Final = "select pgmb.record_dead(%s, %s, %s, %s, %s)"
_LOCK: Final = "select pgmb.lock_lake(%s)"

Letter = tuple[Any, ...]
"""The number of a batch, then a dead letter with the columns of the table."""


class DeadTable(LakeTable):
    """The dead letters of a stream's queues."""

    schema = _FILE_SCHEMA.append(pa.field("date", pa.date32(), nullable=False))
    statistics = ("batch", "id", "died_at")
    holds = "Dead letters"

    def files(self, batch: int) -> list[KnownFile]:
        """The files that may hold dead letters of a batch."""
        found = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return [
            KnownFile(own_path(row["path"]), row["size_bytes"], row["min.id"], row["max.id"])
            for row in found
            if row["min.batch"] <= batch <= row["max.batch"]
        ]

    def between(self, since: datetime, until: datetime) -> Iterator[dict[str, Any]]:
        """Dead letters that died in a time, without their events."""
        died = ("died_at", ">=", since), ("died_at", "<", until)
        for row in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            # A bound of the table may be cut to milliseconds; the file's own rows decide.
            if row["min.died_at"] >= until or row["max.died_at"] < since - timedelta(milliseconds=1):
                continue
            with self.storage.files().open_input_file(own_path(row["path"])) as source:
                yield from pq.read_table(source, columns=_DEATH, filters=died).to_pylist()


class DeadLake(NamedTuple):
    """What the database knows of the table."""

    url: str
    source: str
    verified: int | None
    planned: int | None


class Batch(NamedTuple):
    """Dead letters to write, as they were when they were planned."""

    number: int
    letters: list[Letter]


class DeadArchived(msgspec.Struct, frozen=True):
    """A batch that was verified and recorded. adopted: an earlier run had committed it."""

    batch: int
    dead_letters: int
    files: int
    bytes: int
    lake_version: int
    adopted: bool = False


class DeadArchiver:
    """Archives the dead letters of a stream's queues. `options` are those of the storage."""

    def __init__(
        self,
        dsn: str,
        stream: str,
        *,
        options: Mapping[str, str] | None = None,
        batch_letters: int = _BATCH_LETTERS,
    ) -> None:
        self._dsn, self._stream, self._options, self._most = dsn, stream, options, batch_letters

    def archive(self, *, repair: bool = False) -> Iterator[DeadArchived]:
        """Archive what is dead, batch by batch. Yields nothing while another archiver is at work.

        Raises VerificationFailed for a batch that is not in the table as it was planned; with `repair` it is
        taken out of the table and its dead letters are written again.
        """
        with session(self._dsn, "pgmb lake") as database:
            if not lock_lake(database, self._stream):
                return
            while True:
                lake = dead_lake(database, self._stream)
                table = self.open(lake)
                verified = 0 if lake.verified is None else lake.verified
                replaced: list[KnownFile] = []
                if table.committed > verified:
                    try:
                        yield self.settle(database, table, table.committed, adopted=True)
                        continue
                    except VerificationFailed:
                        if not repair:
                            raise
                        replaced = table.files(table.committed)
                # Nothing may be left of a batch that is taken out.
                batch = self.plan(database, empty=bool(replaced))
                if batch is None:
                    return
                written = self.write(table.storage, batch)
                if self.commit(table, batch, written, replaced):
                    yield self.settle(database, table, batch.number)

    # -- The steps -------------------------------------------------------------------------------------------

    def open(self, lake: DeadLake) -> DeadTable:
        table = DeadTable.open(Storage.at(lake.url, self._options), lake.source)
        if lake.verified is not None and table.committed < lake.verified:
            behind = ForeignTable(
                f"the table at {lake.url} ends with batch {table.committed}, but batch {lake.verified}"
                " was verified in it"
            )
            behind.advise("The table was replaced or restored. Bring its newer version back.")
            raise behind
        if table.committed > (lake.planned or -1):
            ahead = ForeignTable(
                f"the table at {lake.url} has batch {table.committed}, which this database did not plan"
            )
            ahead.advise("The database was restored from a backup that is older than the table.")
            raise ahead
        return table

    def plan(self, database: psycopg.Connection[Any], *, empty: bool = False) -> Batch | None:
        """The next batch; None: nothing is dead that is not archived."""
        rows = database.execute(_PLAN, [self._stream, self._most, empty]).fetchall()
        return Batch(rows[0][0], [row for row in rows if row[1] is not None]) if rows else None

    def write(self, storage: Storage, batch: Batch) -> list[WrittenFile]:
        """A file for each date on which they died."""
        dates: dict[str, list[Letter]] = {}
        for letter in batch.letters:
            dates.setdefault(letter[3].astimezone(UTC).date().isoformat(), []).append(letter)
        return [_written(storage, date, dates[date]) for date in sorted(dates)]

    def commit(
        self, table: DeadTable, batch: Batch, files: Sequence[WrittenFile], replaced: Sequence[KnownFile] = ()
    ) -> bool:
        """Commit the files of a batch. False if another archiver was first."""
        return table.commit(batch.number, files, {"dead_letters": len(batch.letters)}, replaced)

    def settle(
        self, database: psycopg.Connection[Any], table: DeadTable, batch: int, *, adopted: bool = False
    ) -> DeadArchived:
        """Verify and record a committed batch. Raises VerificationFailed if it is not as it was planned."""
        files = table.files(batch)
        count, digest = self.verify(table, batch, files)
        self.record(database, table, batch, count, digest)
        size = sum(file.bytes for file in files)
        return DeadArchived(batch, count, len(files), size, table.version, adopted)

    def verify(self, table: DeadTable, batch: int, files: Sequence[KnownFile]) -> tuple[int, bytes]:
        """What the table holds of a batch, read back: the number of dead letters, and their digest."""
        storage = table.storage.files()
        letters: list[Letter] = []
        for file in files:
            try:
                with storage.open_input_file(file.path) as source:
                    found = pq.ParquetFile(source, page_checksum_verification=True).read()
                columns = [found.column(name).to_pylist() for name in _FILE_SCHEMA.names]
            except (OSError, pa.ArrowException, KeyError) as error:
                lost = VerificationFailed(f"{file.path}: {' '.join(str(error).split())[:300]}")
                lost.advise("The dead letters stay in the database. Run `pgmb lake archive --repair`.")
                raise lost from error
            letters += [letter for letter in zip(*columns, strict=True) if letter[0] == batch]
        return len(letters), digest_of(sorted(letters, key=lambda letter: letter[1]))

    def record(
        self, database: psycopg.Connection[Any], table: DeadTable, batch: int, count: int, digest: bytes
    ) -> None:
        """Tell the database what the table holds. It compares that with its plan."""
        database.execute(_RECORD, [self._stream, batch, count, digest, table.version])


def lock_lake(database: psycopg.Connection[Any], stream: str) -> bool:
    """Whether this session has the lock of archivers."""
    return database.execute(_LOCK, [stream]).fetchone() == (True,)


def dead_lake(database: psycopg.Connection[Any], stream: str) -> DeadLake:
    with database.cursor(row_factory=class_row(DeadLake)) as cursor:
        found = cursor.execute(_DEAD_LAKE, [stream]).fetchone()
    assert found is not None  # noqa: S101 - the function returns a row or raises
    return found


def digest_of(letters: Iterable[Letter]) -> bytes:
    """The SHA-256 over those of the dead letters by id, each as record_send() encodes its row."""
    whole = hashlib.sha256()
    head = struct.pack(">i", len(_OIDS))
    for letter in letters:
        row = bytearray(head)
        for kind, value in zip(_OIDS, letter[1:], strict=True):
            sent = None if value is None else _sent(kind, value)
            row += struct.pack(">ii", kind, -1 if sent is None else len(sent)) + (sent or b"")
        whole.update(hashlib.sha256(row).digest())
    return whole.digest()


def _sent(kind: int, value: Any) -> bytes:
    if kind == _KINDS[_TIME]:
        return struct.pack(">q", _micros(value))
    if kind == _KINDS[pa.string()]:
        return str(value).encode()
    return struct.pack(">q" if kind == _KINDS[pa.int64()] else ">i", value)


def _micros(value: datetime) -> int:
    """Since 2000, exactly."""
    since = value - datetime(2000, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _written(storage: Storage, date: str, letters: Sequence[Letter]) -> WrittenFile:
    path = f"date={date}/{letters[0][0]}-{uuid.uuid4()}.parquet"
    columns = [list(column) for column in zip(*letters, strict=True)]
    table = pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, _FILE_SCHEMA, strict=True)],
        schema=_FILE_SCHEMA,
    )
    storage.make_folder(path)
    with storage.files().open_output_stream(path) as sink:
        # Not of keys, payloads and errors: an erasure does not reach the table's log.
        pq.write_table(
            table,
            sink,
            compression="zstd",
            write_statistics=list(DeadTable.statistics),
            write_page_checksum=True,
        )
        size = sink.tell()
    storage.flush(path)
    lowest, highest = (
        {
            "batch": letters[0][0],
            "id": chosen(letter[1] for letter in letters),
            "died_at": chosen(letter[3] for letter in letters)
            .astimezone(UTC)
            .isoformat(timespec="microseconds")
            .replace("+00:00", "Z"),
        }
        for chosen in (min, max)
    )
    return WrittenFile(
        path=path,
        date=date,
        bytes=size,
        rows=len(letters),
        lowest=lowest,
        highest=highest,
        written_at=time.time_ns() // 1_000_000,
    )
