"""Care for a stream's table: verify it again, join small files, remove old ones, rebuild the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import psycopg
import pyarrow

from pgmb._core.connecting import session
from pgmb.errors import Conflict, VerificationFailed
from pgmb.lake.archive import Archiver, Lake, Pending, Run, lake_of
from pgmb.lake.delta import EventTable, KnownFile
from pgmb.lake.digest import Block, BlockDigests, Digested
from pgmb.lake.events import EVENTS, FILE_SCHEMA
from pgmb.lake.storage import Storage
from pgmb.lake.task import (
    DamagedError,
    DateWriter,
    FileGroup,
    WrittenFile,
    in_order,
    read_group,
)
from pgmb.spark.source.offsets import SEGMENT_BITS

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_ARCHIVED: Final = (
    "select segment, events, digest, erased_digest, dropped from pgmb.archived_segments(%s, %s)"
)
_DAMAGED: Final = "select pgmb.record_damage(%s, %s, %s)"
_SOUND: Final = "select pgmb.record_sound(%s, %s)"
_ORPHANED: Final = "select orphaned from pgmb.orphaned_segments(%s) orphaned"
_ADOPT: Final = "select pgmb.adopt_archived(%s, %s, %s, %s, %s, %s)"
# A file is joined with others if it has less than this part of the target.
_SMALL: Final = 0.75
_READ_AT_ONCE: Final = 64
"""Segments: the more, the later a damage is recorded."""


class LocalRun:
    """Runs tasks in threads of this process: most of their work is Arrow's, outside of Python's lock."""

    def __init__(self, parallelism: int | None = None) -> None:
        self.parallelism = parallelism or min(4, os.cpu_count() or 1)

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Sequence[_Task], result: type[_Result]
    ) -> list[_Result]:
        with ThreadPoolExecutor(self.parallelism) as threads:
            return list(threads.map(work, tasks))


class Expected(NamedTuple):
    """An archived segment, and what the manifest says of it."""

    segment: int
    events: int
    digest: bytes
    erased_digest: bytes | None
    dropped: bool


class Damage(msgspec.Struct, frozen=True):
    """A segment that the table does not hold as the log did. kept: the log still has it."""

    segment: int
    failure: str
    kept: bool


class Verified(msgspec.Struct, frozen=True):
    """segments and events: those that were read and found as they should be."""

    segments: int
    events: int
    damaged: list[Damage]


class Compacted(msgspec.Struct, frozen=True):
    """How many files of how many bytes were replaced, by how many."""

    replaced: int
    replaced_bytes: int
    files: int
    bytes: int


class Adopted(msgspec.Struct, frozen=True):
    """Segments that are in the manifest now, and those that are not, with the reason."""

    segments: list[int]
    refused: dict[int, str]


class Keeper:
    """Cares for the table of a stream.

    run      runs tasks; by default threads of this process
    options  of the storage, by the names of `deltalake`
    """

    def __init__(
        self, dsn: str, stream: str, *, run: Run | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self._dsn, self._stream, self._options = dsn, stream, options
        self._run: Run = run or LocalRun()
        self._archiver = Archiver(dsn, stream, self._run, options=options)

    def verify(self, since: datetime | None = None) -> Verified:
        """Read the files of archived segments that were closed since a time, and record what is damaged, and
        what no longer is.

        Damaged segments that the log has are not archived any more: retention keeps them, and
        `pgmb lake archive --repair` writes their files again.
        """
        events, sound, damaged = 0, list[int](), list[Damage]()
        with session(self._dsn, "pgmb lake") as database:
            lake = lake_of(database, self._stream)
            given = [self._stream, since or "-infinity"]
            expected = [Expected(*row) for row in database.execute(_ARCHIVED, given)]
            table = self._archiver.open(lake)
            for begin in range(0, len(expected), _READ_AT_ONCE):
                some = expected[begin : begin + _READ_AT_ONCE]
                found, _ = self._archiver.verify(lake, table, [whole(one.segment) for one in some])
                for one in some:
                    failure = _difference(one, found[one.segment])
                    if failure is None:
                        events += one.events
                        sound.append(one.segment)
                        continue
                    row = database.execute(_DAMAGED, [self._stream, one.segment, failure]).fetchone()
                    damaged.append(Damage(one.segment, failure, row is not None and bool(row[0])))
            database.execute(_SOUND, [self._stream, sound])
        return Verified(len(sound), events, damaged)

    def compact(self, target: int) -> Compacted:
        """Join small files of a date to files of about `target` bytes. New files are read back first.

        Raises Conflict if an archiver is at work, VerificationFailed if a file is damaged.
        """
        with self._alone() as (_, lake, table):
            groups = list(small_files(table.files(-1, 1 << 62), target))
            done = [self._join(lake, table, group, target) for group in groups]
        return Compacted(
            sum(len(group) for group in groups),
            sum(file.bytes for group in groups for file in group),
            sum(len(files) for files in done),
            sum(file.bytes for files in done for file in files),
        )

    def vacuum(self, hours: int, *, dry_run: bool = False) -> list[str]:
        """Remove files that belong to no version of the table of the last hours: replaced ones, and those of
        archivers that were killed. Raises Conflict if an archiver is at work."""
        with self._alone() as (_, _, table):
            return table.vacuum(hours, dry_run=dry_run)

    def adopt(self) -> Adopted:
        """Record what the table holds and the manifest does not: segments of the log after a comparison with
        it, and dropped ones if the files hold what the table's commits say."""
        with self._alone() as (database, lake, table):
            pending = [one for one in self._archiver.plan(database) if one.segment <= table.committed]
            done: list[int] = []
            if pending:
                done += self._archiver.settle(database, lake, table, pending, adopted=True).segments
            numbers = [number for (number,) in database.execute(_ORPHANED, [self._stream])]
            refused: dict[int, str] = {}
            if numbers:
                told = table.told()
                found, _ = self._archiver.verify(lake, table, [whole(number) for number in numbers])
                for number in numbers:
                    failure = self._adopt(database, table, number, found[number], told.get(number))
                    if failure is None:
                        done.append(number)
                    else:
                        refused[number] = failure
        return Adopted(sorted(done), refused)

    def _adopt(
        self,
        database: psycopg.Connection[Any],
        table: EventTable,
        number: int,
        found: Digested | str,
        told: dict[str, Any] | None,
    ) -> str | None:
        """Why a segment is not adopted; None if it is."""
        if told is None:
            return "no commit of the table says what it holds"
        expected = Expected(number, told["events"], bytes.fromhex(told["digest"]), None, True)
        if (failure := _difference(expected, found)) is None:
            database.execute(
                _ADOPT,
                [self._stream, number, told["epoch"], expected.events, expected.digest, table.version],
            )
        return failure

    def _join(
        self, lake: Lake, table: EventTable, group: Sequence[KnownFile], target: int
    ) -> list[WrittenFile]:
        task = Rewrite(table.storage, lake.salt, [file.path for file in group], group[0].lowest_seq, target)
        (done,) = self._run(rewrite, [task], Rewritten)
        if done.fault is not None:
            broken = VerificationFailed(f"files of {lake.url} cannot be joined: {done.fault}")
            broken.advise("Run `pgmb lake verify`. The table is as it was.")
            raise broken
        table.rewrite(done.files, group)
        return done.files

    @contextmanager
    def _alone(self) -> Generator[tuple[psycopg.Connection[Any], Lake, EventTable]]:
        """While no archiver works on the stream."""
        with session(self._dsn, "pgmb lake") as database:
            if not self._archiver.lock(database):
                busy = Conflict(f"an archiver works on stream {self._stream}")
                busy.advise("Try again when it has finished, or stop `pgmb lake archive --follow` meanwhile.")
                raise busy
            lake = lake_of(database, self._stream)
            yield database, lake, self._archiver.open(lake)


def small_files(files: Iterable[KnownFile], target: int) -> Generator[list[KnownFile]]:
    """Groups of small files of one date that follow one another, each of about `target` bytes."""
    by_date: dict[str, list[KnownFile]] = {}
    for file in sorted(files, key=lambda file: file.lowest_seq):
        by_date.setdefault(file.path.partition("/")[0], []).append(file)
    for its in by_date.values():
        group: list[KnownFile] = []
        for file in its:
            if file.bytes >= target * _SMALL or sum(one.bytes for one in group) + file.bytes > target:
                if len(group) > 1:
                    yield group
                group = []
            if file.bytes < target * _SMALL:
                group.append(file)
        if len(group) > 1:
            yield group


# -- The task ------------------------------------------------------------------------------------------------


class Rewrite(msgspec.Struct, frozen=True):
    """Files of one date to join, whose first event has this number."""

    storage: Storage
    salt: int
    paths: list[str]
    first: int
    file_bytes: int


class Rewritten(msgspec.Struct, frozen=True):
    """The new files. `fault` says why they are not to be used."""

    files: list[WrittenFile]
    fault: str | None = None


def rewrite(task: Rewrite) -> Rewritten:
    """Write the events of files to new ones, and read those back: they must have the same digests."""
    named = date.fromisoformat(task.paths[0].partition("/")[0].removeprefix("date="))
    day = (named - datetime(1970, 1, 1, tzinfo=UTC).date()).days
    writer = DateWriter(task.storage, EVENTS, day, task.first, task.file_bytes)
    digests = BlockDigests(task.salt)
    try:
        for events in in_order(task.storage.files(), task.paths):
            digests.add(events)
            writer.add(pa.RecordBatch.from_arrays(events.columns, schema=FILE_SCHEMA))
    except DamagedError as damaged:
        return Rewritten([], str(damaged))
    files = writer.finish()
    before: list[Block] = digests.blocks()
    read = read_group(FileGroup(task.storage, task.salt, [file.path for file in files]))
    if read.fault is not None or read.blocks != before:
        return Rewritten([], read.fault or "what was written differs from what was read")
    return Rewritten(files)


def whole(segment: int) -> Pending:
    """A segment, wherever its events are."""
    return Pending(segment, (segment << SEGMENT_BITS) - 1, None, 0, datetime.now(UTC))


def _difference(expected: Expected, found: Digested | str) -> str | None:
    if isinstance(found, str):
        return found
    if found.events != expected.events:
        return f"the table has {found.events} of {expected.events} events"
    # An erasure that is under way has committed its files, or not yet.
    known = {bytes(one) for one in (expected.digest, expected.erased_digest) if one is not None}
    return None if found.digest in known else "the digests differ"
