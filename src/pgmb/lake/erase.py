"""Erase the rows of keys in a stream's tables of the lake: write their files again, remove the old ones.

scan → digest → write → expect → commit → record → vacuum. Each step can be repeated. Before the commit the
database learns what the table will hold: a verification meanwhile finds one of two known digests.
See docs/adr/0036-an-erased-event-is-a-tombstone.md.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
import psycopg
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from pgmb.errors import Conflict, VerificationFailed
from pgmb.lake import digest
from pgmb.lake.archive import Archiver, Lake, lake_of
from pgmb.lake.care import LocalRun, whole
from pgmb.lake.dead import DeadArchiver, dead_lake, lock_lake
from pgmb.lake.delta import EventTable, KnownFile, LakeTable, files_in
from pgmb.lake.digest import BlockDigests, Digested
from pgmb.lake.events import WRITING
from pgmb.lake.projection.declaration import names_of
from pgmb.lake.projection.projector import Projector
from pgmb.lake.storage import Storage
from pgmb.lake.task import DamagedError, WrittenFile, in_order, plain
from pgmb.spark.source.offsets import SEGMENT_BITS

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute
pq: Any = pyarrow.parquet

_KNOWN: Final = "select segment, epoch, events, digest, erased_digest from pgmb.lake_erasures(%s)"
_TRACES: Final = "select pgmb.erase_lake_traces(%s, %s, %s, %s::uuid[])"
_EXPECT: Final = "select pgmb.expect_erased(%s, %s, %s, %s, %s, %s)"
_RECORD: Final = "select pgmb.record_erased(%s, %s, %s, %s, %s, %s)"
_NOTE: Final = "select pgmb.note_lake_erasure(%s, %s, %s, %s, %s, %s::bigint[], %s)"


class Change(msgspec.Struct, frozen=True):
    """What becomes of the rows of keys. `values` are what they hold instead, by column."""

    keys: list[str]
    column: str
    values: dict[str, str | None]

    def mask(self, rows: Any) -> Any:
        """Which rows have one of the keys."""
        return pc.is_in(rows.column(self.column), value_set=pa.array(self.keys, pa.string()))

    def applied(self, rows: Any) -> Any:
        mask = self.mask(rows)
        for name, value in self.values.items():
            place = rows.schema.get_field_index(name)
            field = rows.schema.field(place)
            emptied = pc.if_else(mask, pa.scalar(value, field.type), rows.column(place))
            rows = rows.set_column(place, field, emptied)
        return rows


class Erasable(NamedTuple):
    """A table of the lake, and how its rows are erased."""

    table: LakeTable
    change: Change


class Known(NamedTuple):
    """A verified segment, and what the table holds of it, or will hold."""

    segment: int
    epoch: int
    events: int
    digest: bytes
    erased: bytes | None


class FileTask(msgspec.Struct, frozen=True):
    """A file to look into, or to write again."""

    storage: Storage
    path: str
    change: Change
    statistics: tuple[str, ...]
    is_events: bool


class Scanned(msgspec.Struct, frozen=True):
    """The rows of a file with one of the keys: how many, and of a table of events their segments and ids."""

    path: str
    rows: int
    segments: list[int]
    ids: list[str]
    fault: str | None = None


class Group(NamedTuple):
    """Files to be replaced in one commit, and the segments that change with them."""

    files: list[Scanned]
    segments: list[int]


class LakeEraser:
    """Erases the rows of keys in the tables of a stream. `options` open the storage."""

    def __init__(
        self, dsn: str, stream: str, keys: Sequence[str], options: Mapping[str, str] | None = None
    ) -> None:
        self.stream, self._dsn = stream, dsn
        self._keys, self._options = list(keys), options
        self._run = LocalRun()
        self._archiver = Archiver(dsn, stream, self._run, options=options)
        self._dead = DeadArchiver(dsn, stream, options=options)

    def tables(self, database: psycopg.Connection[Any], erasure: UUID | None = None) -> list[Erasable]:
        """Every table of the stream that holds events. A further one is a line here."""
        lake = lake_of(database, self.stream)
        mark = f'{{"pgmb-erased":"{erasure}"}}'
        tombstone = {"key": None, "payload": "null", "headers": mark}
        return [
            Erasable(self._archiver.open(lake), Change(self._keys, "key", tombstone)),
            Erasable(
                self._dead.open(dead_lake(database, self.stream)),
                Change(self._keys, "key", {**tombstone, "error": None}),
            ),
        ]

    def count(self, database: psycopg.Connection[Any]) -> list[tuple[str, int]]:
        """How many rows of each table have one of the keys."""
        return [
            (one.table.storage.url, sum(file.rows for file in self.scan(one)))
            for one in (*self.tables(database), *(one for _, one in self.projections(database)))
        ]

    def projections(self, database: psycopg.Connection[Any]) -> list[tuple[Projector, Erasable]]:
        """The projections of the stream: they follow what becomes of the events."""
        found = [
            Projector(self._dsn, name, self._run, options=self._options)
            for name in names_of(database, self.stream)
        ]
        change = Change(self._keys, "event_key", {})
        return [(one, Erasable(one.open(one.find(database))[1], change)) for one in found]

    def lock(self, database: psycopg.Connection[Any]) -> None:
        """Keep archivers off. Raises Conflict if one is at work."""
        if not lock_lake(database, self.stream):
            busy = Conflict(f"an archiver works on stream {self.stream}")
            busy.advise("Try again when it has finished, or stop `pgmb lake archive --follow` meanwhile.")
            raise busy
        self.tables(database)
        self.projections(database)

    def erase(self, database: psycopg.Connection[Any], erasure: UUID, told: Callable[[str], None]) -> None:
        """Erase the rows in all tables."""
        lake = dead_lake(database, self.stream)
        dead = self._dead.open(lake)
        if dead.committed > (lake.verified or 0):
            # It is compared with its plan, which has the dead letters as they were.
            self._dead.settle(database, dead, dead.committed, adopted=True)
        for one in self.tables(database, erasure):
            # An archiver that lost its lock may have files of before the erasure: its commit is refused.
            one.table.commit(one.table.committed, [], {"segments": []})
            found = self.scan(one)
            if isinstance(one.table, EventTable):
                self.erase_events(database, erasure, one, found)
            else:
                self.erase_rows(database, erasure, one, found)
            self.vacuum(database, erasure, one)
            told(f"{self.stream}: {one.table.storage.url}")
        for projector, one in self.projections(database):
            self._note(database, erasure, one.table, self.scan(one))
            projector.follow_erasure()
            self._note(database, erasure, one.table, (), done=True)
            told(f"{self.stream}: {one.table.storage.url}")

    # -- The steps -------------------------------------------------------------------------------------------

    def scan(self, one: Erasable) -> list[Scanned]:
        """The files that have rows to erase. Reads the column of the key of all files."""
        tasks = [_task(one, path) for path in files_in(one.table)]
        found = self._run(scan, tasks, Scanned)
        for file in found:
            if file.fault is not None:
                raise _damaged(one.table, file.fault)
        return [file for file in found if file.rows]

    def erase_events(
        self, database: psycopg.Connection[Any], erasure: UUID, one: Erasable, found: Sequence[Scanned]
    ) -> None:
        """Replace files of events, group by group, and let the database compare digests."""
        assert isinstance(one.table, EventTable)  # noqa: S101
        lake, table = lake_of(database, self.stream), one.table
        self.resume(database, erasure, lake, table)
        known = {row.segment: row for row in self._known(database)}
        for group in grouped(found):
            ids = [id for file in group.files for id in file.ids]
            _one(database, _TRACES, erasure, self._keys, self.stream, ids)
            before, after = self.digest(lake, table, one.change, group)
            written = self.write(database, erasure, one, group.files)
            verified = [number for number in group.segments if number in known]
            _one(
                database, _EXPECT, erasure, self._keys, self.stream, verified,
                [before[number].digest for number in verified], [after[number].digest for number in verified],
            )  # fmt: skip
            segments = [
                {
                    "segment": number,
                    "epoch": known[number].epoch if number in known else lake.epoch,
                    "events": after[number].events,
                    "digest": after[number].digest.hex(),
                }
                for number in group.segments
            ]
            self.commit(table, written, {"segments": segments}, group.files)
            self.record(database, erasure, lake, table, verified)
        if pending := [row for row in self._archiver.plan(database) if row.segment <= table.committed]:
            # Committed and not recorded: they are compared with the log, which is erased too.
            self._archiver.settle(database, lake, table, pending, adopted=True)

    def resume(self, database: psycopg.Connection[Any], erasure: UUID, lake: Lake, table: EventTable) -> None:
        """Record segments whose files were committed by a run that was killed then."""
        begun = [row for row in self._known(database) if row.erased is not None]
        if not begun:
            return
        found, _ = self._archiver.verify(lake, table, [whole(row.segment) for row in begun])
        done = [row.segment for row in begun if _digest_of(found[row.segment]) == row.erased]
        self.record(database, erasure, lake, table, done)

    def digest(
        self, lake: Lake, table: EventTable, change: Change, group: Group
    ) -> tuple[Mapping[int, Digested], Mapping[int, Digested]]:
        """The digests of a group's segments as they are and as they will be."""
        before, after = BlockDigests(lake.salt), BlockDigests(lake.salt)
        try:
            for events in in_order(table.storage.files(), self._paths(table, group.segments)):
                before.add(events)
                after.add(change.applied(events))
        except DamagedError as damaged:
            raise _damaged(table, str(damaged)) from damaged
        return digest.segments(before.blocks()), digest.segments(after.blocks())

    def write(
        self, database: psycopg.Connection[Any], erasure: UUID, one: Erasable, files: Sequence[Scanned]
    ) -> list[WrittenFile]:
        """Write files again, and note which they replace."""
        tasks = [_task(one, file.path) for file in files]
        written = self._run(rewrite, tasks, WrittenFile)
        self._note(database, erasure, one.table, files)
        return written

    def commit(
        self,
        table: LakeTable,
        written: Sequence[WrittenFile],
        told: dict[str, Any],
        replaced: Sequence[Scanned],
    ) -> None:
        """Replace files in one commit of the table."""
        gone = [KnownFile(file.path, 0, 0, 0) for file in replaced]
        if not table.commit(table.committed, written, told, gone):
            raise Conflict(f"another archiver commits to the table at {table.storage.url}")

    def record(
        self,
        database: psycopg.Connection[Any],
        erasure: UUID,
        lake: Lake,
        table: EventTable,
        segments: Sequence[int],
    ) -> None:
        """Read segments back from the table, and tell the database what it holds now."""
        if not segments:
            return
        found, _ = self._archiver.verify(lake, table, [whole(number) for number in segments])
        digests = [_digest_of(found[number]) for number in segments]
        _one(database, _RECORD, erasure, self._keys, self.stream, list(segments), digests, table.version)

    def erase_rows(
        self, database: psycopg.Connection[Any], erasure: UUID, one: Erasable, found: Sequence[Scanned]
    ) -> None:
        """Replace files of a table whose digests are not kept, in one commit."""
        if found:
            written = self.write(database, erasure, one, found)
            self.commit(one.table, written, {"segments": []}, found)

    def vacuum(self, database: psycopg.Connection[Any], erasure: UUID, one: Erasable) -> None:
        """Remove all files that the table does not list now: replaced ones, and those of killed runs."""
        one.table.vacuum(0, dry_run=False)
        self._note(database, erasure, one.table, (), done=True)

    def _note(
        self,
        database: psycopg.Connection[Any],
        erasure: UUID,
        table: LakeTable,
        files: Sequence[Scanned],
        *,
        done: bool = False,
    ) -> None:
        paths, rows = [file.path for file in files], [file.rows for file in files]
        _one(database, _NOTE, erasure, self._keys, self.stream, table.storage.url, paths, rows, done)

    def _known(self, database: psycopg.Connection[Any]) -> list[Known]:
        return [
            Known(segment, epoch, events, bytes(held), None if erased is None else bytes(erased))
            for segment, epoch, events, held, erased in database.execute(_KNOWN, [self.stream])
        ]

    def _paths(self, table: EventTable, segments: Iterable[int]) -> list[str]:
        files = {
            file.path: file
            for number in segments
            for file in table.files((number << SEGMENT_BITS) - 1, (number + 1 << SEGMENT_BITS) - 1)
        }
        return [file.path for file in sorted(files.values(), key=lambda file: (file.lowest_seq, file.path))]


def _task(one: Erasable, path: str) -> FileTask:
    table = one.table
    return FileTask(table.storage, path, one.change, table.statistics, isinstance(table, EventTable))


def grouped(found: Iterable[Scanned]) -> list[Group]:
    """Files that share a segment, with all segments that change with them."""
    groups: list[tuple[set[int], list[Scanned]]] = []
    for file in found:
        segments, files = set(file.segments), [file]
        apart: list[tuple[set[int], list[Scanned]]] = []
        for its, others in groups:
            if its.isdisjoint(segments):
                apart.append((its, others))
            else:
                segments |= its
                files = others + files
        groups = [*apart, (segments, files)]
    return [Group(files, sorted(segments)) for segments, files in groups]


# -- The tasks -----------------------------------------------------------------------------------------------


def scan(task: FileTask) -> Scanned:
    """Look for rows with one of the keys."""
    rows, segments, ids = 0, set[int](), list[str]()
    try:
        with task.storage.files().open_input_file(task.path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            for group in range(file.metadata.num_row_groups):
                keys = file.read_row_group(group, columns=[task.change.column])
                mask = task.change.mask(keys)
                if not (count := pc.sum(mask).as_py()):
                    continue
                rows += count
                if task.is_events:
                    named = file.read_row_group(group, columns=["seq", "id"]).filter(mask)
                    segments |= {seq >> SEGMENT_BITS for seq in named.column("seq").to_pylist()}
                    ids += named.column("id").to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        return Scanned(task.path, 0, [], [], f"{task.path}: {' '.join(str(error).split())[:300]}")
    return Scanned(task.path, rows, sorted(segments), ids)


def rewrite(task: FileTask) -> WrittenFile:
    """Write a file again with its rows changed, under a new name, with the same row groups."""
    files = task.storage.files()
    date = task.path.partition("/")[0].removeprefix("date=")
    path = f"date={date}/erased-{uuid.uuid4()}.parquet"
    bounds: list[dict[str, Any]] = []
    rows = 0
    with files.open_input_file(task.path) as source:
        file = pq.ParquetFile(source, page_checksum_verification=True)
        writing = WRITING if task.is_events else {**_PLAIN_WRITING, "write_statistics": list(task.statistics)}
        with files.open_output_stream(path) as sink:
            with pq.ParquetWriter(sink, file.schema_arrow, **writing) as writer:
                for group in _row_groups(file):
                    changed = task.change.applied(group)
                    writer.write_table(changed, row_group_size=max(changed.num_rows, 1))
                    rows += changed.num_rows
                    bounds.append({name: pc.min_max(changed.column(name)) for name in task.statistics})
            size = sink.tell()
    task.storage.flush(path)
    return WrittenFile(
        path=path,
        date=date,
        bytes=size,
        rows=rows,
        lowest={name: min(plain(one[name]["min"]) for one in bounds) for name in task.statistics},
        highest={name: max(plain(one[name]["max"]) for one in bounds) for name in task.statistics},
        written_at=time.time_ns() // 1_000_000,
    )


def _row_groups(file: Any) -> Iterator[Any]:
    for group in range(file.metadata.num_row_groups):
        yield file.read_row_group(group).combine_chunks()


_PLAIN_WRITING: Final[dict[str, Any]] = {"compression": "zstd", "write_page_checksum": True}


def _digest_of(found: Digested | str) -> bytes:
    """What was read; or nothing, which equals no digest."""
    return b"" if isinstance(found, str) else found.digest


def _damaged(table: LakeTable, fault: str) -> VerificationFailed:
    broken = VerificationFailed(f"the table at {table.storage.url} cannot be read: {fault}")
    broken.advise("Restore the file, or run `pgmb lake archive --repair`. Then erase again: it continues.")
    return broken


def _one(database: psycopg.Connection[Any], statement: str, *given: object) -> Any:
    row = database.execute(statement.encode(), given).fetchone()
    return None if row is None else row[0]
