"""The archiver: sealed segments of a stream to its table in the lake, each exactly once, and verified.

plan → write → commit → verify → record. Each step can be repeated: files that were not committed belong to no
table, and segments that were committed but not recorded are verified and recorded by the next run. Segments
are dropped from the log only after they were recorded. See docs/explanation/lake.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
import psycopg
from psycopg.rows import class_row

from pgmb._core.connecting import connect, session
from pgmb.errors import ForeignTable, VerificationFailed, translated
from pgmb.lake import digest
from pgmb.lake.dead import DeadTable, dead_lake, lock_lake
from pgmb.lake.delta import EventTable, KnownFile, overlapping
from pgmb.lake.digest import BLOCK_BITS, Digested
from pgmb.lake.storage import Storage
from pgmb.lake.task import FileGroup, GroupRead, Part, WrittenFile, read_group, write_part
from pgmb.spark.source.offsets import SEGMENT_BITS

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_MEGABYTE: Final = 1024 * 1024
# Of the log, for one task: small parts make small files, and a failed task has to repeat all of a large one.
_PART_BYTES: Final = (16 * _MEGABYTE, 1024 * _MEGABYTE)
_DIGESTING: Final = 4

_LAKE: Final = "select url, source, salt, epoch, verified from pgmb.lake_of(%s)"
_PLAN: Final = "select segment, lo, hi, bytes, sealed_at from pgmb.plan_archive(%s)"
_DIGEST: Final = "select events, digest from pgmb.digest_segment(%s, %s)"
_RECORD: Final = "select pgmb.record_archived(%s, %s, %s, %s, %s)"
_DAMAGED: Final = "select pgmb.record_damage(%s, %s, %s)"
_CREATE: Final = "select pgmb.create_lake(%s, %s, %s, dead_url => %s, keep_dead => %s)"


class Run(Protocol):
    """Runs tasks, in parallel, and returns their results."""

    parallelism: int

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Sequence[_Task], result: type[_Result]
    ) -> list[_Result]: ...


class Sizes(msgspec.Struct, frozen=True):
    """file_bytes: after which a file is complete; commit_bytes: of the log, after which to commit."""

    file_bytes: int = 192 * _MEGABYTE
    commit_bytes: int = 16 * 1024 * _MEGABYTE


class Lake(NamedTuple):
    """What the database knows of a stream's lake."""

    url: str
    source: str
    salt: int
    epoch: int
    verified: int | None


class Pending(NamedTuple):
    """A sealed segment that is not archived. Its events have lo < seq <= hi; hi None: there are none."""

    segment: int
    lo: int
    hi: int | None
    bytes: int
    sealed_at: datetime

    @property
    def end(self) -> int:
        """The highest seq that the segment could have."""
        return self.lo + (1 << SEGMENT_BITS)


class Archived(msgspec.Struct, frozen=True):
    """Segments that were verified and recorded. adopted: an earlier run had committed them."""

    segments: list[int]
    events: int
    files: int
    bytes: int
    lake_version: int
    adopted: bool = False


def init(
    dsn: str,
    stream: str,
    url: str,
    keep_hot: object = None,
    options: Mapping[str, str] | None = None,
    *,
    dead_url: str | None = None,
    keep_dead: object = None,
) -> str:
    """Create a stream's tables and have retention wait for its archive. Returns the URL of its events."""
    storage = Storage.at(url, options)
    beside = None if dead_url is None else Storage.at(dead_url, options).url
    with connect(dsn, "pgmb lake") as database, translated(), database.transaction():
        database.execute(_CREATE, [stream, storage.url, keep_hot, beside, keep_dead])
        lake, dead = lake_of(database, stream), dead_lake(database, stream)
        # Last: if the tables cannot be had, the database is left as it was.
        EventTable.create(storage, lake.source, stream)
        DeadTable.create(Storage.at(dead.url, options), dead.source, stream)
    return storage.url


class Archiver:
    """Archives a stream.

    run      runs tasks, see `pgmb.lake.spark`
    url      where tasks reach the database, if not by `dsn`
    options  of the storage, by the names of `deltalake`
    """

    def __init__(
        self,
        dsn: str,
        stream: str,
        run: Run,
        *,
        url: str | None = None,
        options: Mapping[str, str] | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self._dsn, self._stream, self._run = dsn, stream, run
        self._url, self._options, self._sizes = url or dsn, options, sizes or Sizes()

    def archive(self, *, repair: bool = False) -> Iterator[Archived]:
        """Archive what is sealed, commit by commit. Yields nothing while another archiver is at work.

        Raises VerificationFailed for segments whose files are not as the log; with `repair` those files
        are replaced first.
        """
        with session(self._dsn, "pgmb lake") as database:
            if not self.lock(database):
                return
            while True:
                lake = lake_of(database, self._stream)
                table = self.open(lake)
                pending = self.plan(database)
                if left := [one for one in pending if one.segment <= table.committed]:
                    if repair:
                        self.repair(database, lake, table, left)
                    yield self.settle(database, lake, table, left, adopted=True)
                elif chosen := self.choose(pending):
                    written, digests = self.write(lake, chosen)
                    if self.commit(lake, table, chosen, written, digests):
                        yield self.settle(database, lake, table, chosen)
                else:
                    return

    # -- The steps -------------------------------------------------------------------------------------------

    def lock(self, database: psycopg.Connection[Any]) -> bool:
        """Whether this archiver is the only one. That saves work; the table's commits are what is safe."""
        return lock_lake(database, self._stream)

    def open(self, lake: Lake) -> EventTable:
        table = EventTable.open(Storage.at(lake.url, self._options), lake.source)
        if lake.verified is not None and table.committed < lake.verified:
            behind = ForeignTable(
                f"the table at {lake.url} ends with segment {table.committed}, but segment {lake.verified}"
                " was verified in it"
            )
            behind.advise("The table was replaced or restored. Bring its newer version back.")
            raise behind
        return table

    def plan(self, database: psycopg.Connection[Any]) -> list[Pending]:
        """The sealed segments that are not archived, without a gap, in their order."""
        return plan(database, self._stream)

    def choose(self, pending: Sequence[Pending]) -> list[Pending]:
        """As many as one commit should have."""
        chosen: list[Pending] = []
        for one in pending:
            chosen.append(one)
            if sum(each.bytes for each in chosen) >= self._sizes.commit_bytes:
                break
        return chosen

    def write(self, lake: Lake, chosen: Sequence[Pending]) -> tuple[list[WrittenFile], dict[int, Digested]]:
        """Write the segments to files, while the database computes their digests."""
        parts = [
            Part(
                self._url, self._stream, lake.salt, Storage.at(lake.url, self._options), lo, hi,
                self._sizes.file_bytes,
            )
            for lo, hi in divide(chosen, self._run.parallelism)
        ]  # fmt: skip
        with ThreadPoolExecutor(min(_DIGESTING, len(chosen))) as threads:
            digests = [(one.segment, threads.submit(self._digest, one.segment)) for one in chosen]
            written = self._run(write_part, parts, list[WrittenFile])
            return [file for files in written for file in files], {
                segment: found.result() for segment, found in digests
            }

    def commit(
        self,
        lake: Lake,
        table: EventTable,
        chosen: Sequence[Pending],
        files: Sequence[WrittenFile],
        digests: Mapping[int, Digested],
        replaced: Sequence[KnownFile] = (),
    ) -> bool:
        """Commit the files of segments, with what they should hold. False if another archiver was first."""
        told = {
            "epoch": lake.epoch,
            "segments": [
                {"segment": number, "events": found.events, "digest": found.digest.hex()}
                for number, found in sorted(digests.items())
            ],
        }
        return table.commit(max(table.committed, chosen[-1].segment), files, told, replaced)

    def settle(
        self,
        database: psycopg.Connection[Any],
        lake: Lake,
        table: EventTable,
        committed: Sequence[Pending],
        *,
        adopted: bool = False,
    ) -> Archived:
        """Verify and record committed segments. Raises VerificationFailed if some are not as the log."""
        found, files = self.verify(lake, table, committed)
        failed: list[str] = []
        for one in committed:
            result = found[one.segment]
            try:
                if isinstance(result, str):
                    raise VerificationFailed(f"segment {one.segment}: {result}")
                self.record(database, table, one, result)
            except VerificationFailed as error:
                failed.append(error.args[0])
                _one(database, _DAMAGED, self._stream, one.segment, error.args[0])
        if failed:
            broken = VerificationFailed(
                f"{len(failed)} of {len(committed)} segments in {lake.url} are not as in the log: "
                + "; ".join(failed[:3])
            )
            broken.advise(
                "They stay in the log. Run `pgmb lake archive --repair` to write their files again."
            )
            raise broken
        return Archived(
            [one.segment for one in committed],
            sum(one.events for one in found.values() if not isinstance(one, str)),
            len(files),
            sum(file.bytes for file in files),
            table.version,
            adopted,
        )

    def verify(
        self, lake: Lake, table: EventTable, committed: Sequence[Pending]
    ) -> tuple[dict[int, Digested | str], list[KnownFile]]:
        """What the files of segments hold, read back; or why they cannot be read."""
        files = table.files(committed[0].lo, committed[-1].end)
        groups = list(overlapping(files))
        tasks = [FileGroup(table.storage, lake.salt, [file.path for file in group]) for group in groups]
        read = self._run(read_group, tasks, GroupRead) if tasks else []
        held = digest.segments(block for one in read for block in one.blocks)
        found: dict[int, Digested | str] = {
            one.segment: held.get(one.segment, digest.EMPTY) for one in committed
        }
        for group, one in zip(groups, read, strict=True):
            if one.fault is not None:
                for number in _segments_of(group):
                    if number in found:
                        found[number] = one.fault
        return found, files

    def record(
        self, database: psycopg.Connection[Any], table: EventTable, one: Pending, found: Digested
    ) -> None:
        """Tell the database what the table holds of a segment. It compares that with the log."""
        _one(database, _RECORD, self._stream, one.segment, found.events, found.digest, table.version)

    def repair(
        self,
        database: psycopg.Connection[Any],
        lake: Lake,
        table: EventTable,
        committed: Sequence[Pending],
    ) -> None:
        """Replace the files of committed segments that are not as the log, in one commit."""
        found, files = self.verify(lake, table, committed)
        wanted = {one.segment: self._digest(one.segment) for one in committed}
        broken = {number for number, expected in wanted.items() if found[number] != expected}
        replaced: list[KnownFile] = []
        # A file may hold several segments: all of them are written again, and so their other files.
        while True:
            replaced = [file for file in files if not broken.isdisjoint(_segments_of([file]))]
            wider = broken.union(*(_segments_of([file]) for file in replaced))
            if wider == broken:
                break
            broken = wider
        if not broken:
            return
        again = [one for one in committed if one.segment in broken]
        if missing := broken - {one.segment for one in again}:
            gone = VerificationFailed(
                f"segments {sorted(missing)} cannot be written again: the log dropped them"
            )
            gone.advise("Restore the files of the table.")
            raise gone
        written: list[WrittenFile] = []
        digests: dict[int, Digested] = {}
        for run in _contiguous(again):
            more, theirs = self.write(lake, run)
            written += more
            digests |= theirs
        self.commit(lake, table, again, written, digests, replaced)

    def _digest(self, segment: int) -> Digested:
        with session(self._dsn, "pgmb lake") as database:
            # It takes a few seconds for a million events.
            database.execute("set statement_timeout = 0")
            events, found = database.execute(_DIGEST, [self._stream, segment]).fetchone() or (0, b"")
            return Digested(events, bytes(found))


def plan(database: psycopg.Connection[Any], stream: str) -> list[Pending]:
    """The sealed segments of a stream that are not archived, without a gap, in their order."""
    with database.cursor(row_factory=class_row(Pending)) as cursor:
        return cursor.execute(_PLAN, [stream]).fetchall()


def divide(chosen: Sequence[Pending], parallelism: int) -> list[tuple[int, int]]:
    """Ranges (lo, hi] of seqs for tasks: of about the same size, since all wait for the last to end, and cut
    between blocks of events, so that each file can be verified alone."""
    held = [(one.lo, one.hi, one.bytes) for one in chosen if one.hi is not None]
    if not held:
        return []
    least, most = _PART_BYTES
    total, tasks = sum(size for _, _, size in held), max(parallelism, 1)
    parts = max(1, min(tasks, total // least))
    if total > parts * most:
        parts = tasks * math.ceil(total / (tasks * most))
    cuts: list[int] = []
    before = 0
    for lo, hi, size in held:
        while len(cuts) + 1 < parts and (missing := total * (len(cuts) + 1) / parts - before) < size:
            first = lo + 1 + int((hi - lo) * missing / size)
            cuts.append(max(lo, (first >> BLOCK_BITS << BLOCK_BITS) - 1))
        before += size
    return [(lo, hi) for lo, hi in pairwise([held[0][0], *cuts, held[-1][1]]) if lo < hi]


def _segments_of(files: Iterable[KnownFile]) -> set[int]:
    return {
        number
        for file in files
        for number in range(file.lowest_seq >> SEGMENT_BITS, (file.highest_seq >> SEGMENT_BITS) + 1)
    }


def _contiguous(segments: Sequence[Pending]) -> Iterator[list[Pending]]:
    """Runs of segments that follow one another."""
    run: list[Pending] = []
    for one in segments:
        if run and one.segment != run[-1].segment + 1:
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def lake_of(database: psycopg.Connection[Any], stream: str) -> Lake:
    with database.cursor(row_factory=class_row(Lake)) as cursor:
        found = cursor.execute(_LAKE, [stream]).fetchone()
    assert found is not None  # noqa: S101 - the function returns a row or raises
    return found


def _one(database: psycopg.Connection[Any], statement: str, *given: object) -> Any:
    row = database.execute(statement.encode(), given).fetchone()
    return None if row is None else row[0]
