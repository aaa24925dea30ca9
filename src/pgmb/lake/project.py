"""Projections: tables with typed columns, made of the payloads of a stream's archived events.

plan → write → commit → record, as the archiver does. The number of the last segment is the version of the
commit, so each archived event is projected once. A projection follows the lake: if files of the lake were
replaced since, by an erasure for example, the rows of their events are made again. docs/adr/0037 explains it.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote

import msgspec
import psycopg
import pyarrow
import pyarrow.compute
import pyarrow.fs
import pyarrow.parquet
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

from pgmb._core.connecting import connect
from pgmb._core.lake import topics
from pgmb.errors import Conflict, ForeignTable, InvalidArgument, VerificationFailed, translated
from pgmb.lake.archive import Run
from pgmb.lake.columns import (
    PARTITION,
    STATISTICS,
    Column,
    Decoder,
    Drift,
    GivenColumn,
    MisfitError,
    Seen,
    SeenField,
    checked,
    drift,
    layout,
    parse_column,
    slices,
)
from pgmb.lake.delta import EventTable, KnownFile, LakeTable, files_of, overlapping
from pgmb.lake.storage import Storage
from pgmb.lake.task import Bounds, DamagedError, DateWriter, WrittenFile, by_day, in_order
from pgmb.spark.source.offsets import SEGMENT_BITS

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute
pafs: Any = pyarrow.fs
pq: Any = pyarrow.parquet

_MEGABYTE: Final = 1024 * 1024
_TOLD: Final = "pgmb"
_LAST: Final = 1 << 62
_ERASED: Final = '{"pgmb-erased":'
_MOST_CONFLICTS: Final = 10
_NOTES: Final = "_pgmb_rebuild"
"""The folder beside the files of a table in which a rebuild notes what it has written."""
_LAST_SESSION_SECONDS: Final = 1.0

_CREATE: Final = "select pgmb.create_projection(%s, %s, %s, %s, bad => %s, url => %s, replace => %s)"
_DROP: Final = "select pgmb.drop_projection(%s)"
_FIND: Final = (
    "select stream, url, source, lake_url, lake_source, patterns, columns, bad, generation, upto"
    " from pgmb.projection_of(%s)"
)
_DESCRIBE: Final = (
    "select name, stream, url, patterns, columns, bad, generation, segment, upto, lake_version,"
    " table_version, rows, rescued, dropped, moved_at, created_at from pgmb.describe_projections()"
)
_FIELDS: Final = "select field, kind, first_seq, last_seq, first_at, last_at from pgmb.describe_fields(%s)"
_LOCK: Final = "select pgmb.lock_projection(%s)"
_RECORD: Final = "select pgmb.record_projection(%s, %s, %s, %s, %s, %s, %s, %s)"
_RECORD_FIELDS: Final = "select pgmb.record_fields(%s, %s, %s, %s, %s, %s, %s, %s)"


class ProjectionSizes(msgspec.Struct, frozen=True):
    """file_bytes: after which a file is complete; commit_bytes: of the lake, after which to commit."""

    file_bytes: int = 192 * _MEGABYTE
    commit_bytes: int = 4096 * _MEGABYTE


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A projection as it is declared.

    topics   patterns of topics
    bad      what becomes of payloads that do not fit: rescue, drop or fail
    url      of its table; None: beside the table of the stream
    """

    name: str
    stream: str = "main"
    topics: list[str]
    columns: list[Column]
    bad: str = "rescue"
    url: str | None = None


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A projection, and where it stood when it was last recorded: the last segment, of those up to `upto`."""

    name: str
    stream: str
    url: str
    patterns: list[str]
    columns: list[Column]
    bad: str
    generation: int
    segment: int | None
    upto: int | None
    lake_version: int | None
    table_version: int | None
    rows: int
    rescued: int
    dropped: int
    moved_at: datetime | None
    created_at: datetime
    drift: list[Drift] = []


class _GivenProjection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topics: str | list[str]
    columns: dict[str, str | GivenColumn]
    stream: str = "main"
    bad: str = "rescue"
    url: str | None = None


class _GivenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    projections: dict[str, _GivenProjection]


def load(text: str) -> list[Declaration]:
    """The declarations of a file in YAML."""
    try:
        given = msgspec.yaml.decode(text, type=_GivenFile)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the file does not declare projections: {error}") from None
    return [
        Declaration(
            name=name,
            stream=one.stream,
            topics=[one.topics] if isinstance(one.topics, str) else one.topics,
            columns=checked([parse_column(column, kind) for column, kind in one.columns.items()]),
            bad=one.bad,
            url=one.url,
        )
        for name, one in given.projections.items()
    ]


def declare(
    dsn: str, declared: Declaration, *, replace: bool = False, options: Mapping[str, str] | None = None
) -> str:
    """Register a projection and create its table. Returns its URL.

    Raises Conflict if it is declared differently; with `replace`, the other declaration takes its place.
    """
    columns = checked(declared.columns)
    Decoder(columns, declared.bad)
    url = None if declared.url is None else Storage.at(declared.url).url
    with connect(dsn, "pgmb lake") as database, translated(), database.transaction():
        given = [declared.name, declared.stream, declared.topics, Jsonb(msgspec.to_builtins(columns))]
        database.execute(_CREATE, [*given, declared.bad, url, replace])
        found = _find(database, declared.name)
        # Last: if the table cannot be had, the database is left as it was.
        ProjectionTable.make(Storage.at(found.url, options), found, declared.name)
    return found.url


def drop(dsn: str, name: str) -> str | None:
    """Forget a projection. Returns the URL of its table, which stays; None: there is none of that name."""
    with connect(dsn, "pgmb lake") as database, translated():
        row = database.execute(_DROP, [name]).fetchone()
    return None if row is None else row[0]


def projections(dsn: str) -> list[Described]:
    """All projections, with the drift of their payloads."""
    with connect(dsn, "pgmb lake") as database, translated():
        with database.cursor(row_factory=dict_row) as cursor:
            found = [msgspec.convert(row, Described) for row in cursor.execute(_DESCRIBE)]
        return [
            msgspec.structs.replace(one, drift=_drift(database, one)) if one.upto is not None else one
            for one in found
        ]


def _drift(database: psycopg.Connection[Any], one: Described) -> list[Drift]:
    with database.cursor(row_factory=class_row(SeenField)) as cursor:
        return drift(one.columns, cursor.execute(_FIELDS, [one.name]).fetchall(), SEGMENT_BITS)


def names_of(database: psycopg.Connection[Any], stream: str) -> list[str]:
    """The projections of a stream."""
    rows = database.execute("select name from pgmb.describe_projections() where stream = %s", [stream])
    return [name for (name,) in rows]


class Projection(msgspec.Struct, frozen=True):
    """What the database knows of a projection."""

    stream: str
    url: str
    source: str
    lake_url: str | None
    lake_source: str
    patterns: list[str]
    columns: list[Column]
    bad: str
    generation: int
    upto: int | None

    @property
    def end(self) -> int:
        """The highest number that an event of its segments could have."""
        return -1 if self.upto is None else _end(self.upto)


def find(dsn: str, name: str) -> Projection:
    """A projection by its name, for roles that may read its stream. Raises ProjectionNotFound."""
    with connect(dsn, "pgmb lake") as database, translated():
        return _find(database, name)


def _find(database: psycopg.Connection[Any], name: str) -> Projection:
    with database.cursor(row_factory=dict_row) as cursor:
        return msgspec.convert(cursor.execute(_FIND, [name]).fetchone(), Projection)


def opened(
    found: Projection, *, version: int | None = None, options: Mapping[str, str] | None = None
) -> DeltaTable:
    """The Delta table of a projection. Raises ForeignTable if it is not there."""
    storage = Storage.at(found.url, options)
    try:
        return DeltaTable(storage.url, version=version, storage_options=storage.options)
    except TableNotFoundError as error:
        gone = ForeignTable(f"there is no table at {storage.url}")
        gone.advise("Give this machine access to the storage, or declare the projection again.")
        raise gone from error


# -- The table -----------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What the newest commit of a generation says: the version of the lake that was read, and counts."""

    segment: int
    lake_version: int
    rescued: int = 0
    dropped: int = 0


class ProjectedFile(NamedTuple):
    """A file of a projection."""

    path: str
    date: str
    rows: int
    lowest_seq: int
    highest_seq: int


def files_in(table: DeltaTable) -> list[ProjectedFile]:
    """The files of a projection's table, in the order of their dates and events."""
    found = [_projected(row) for row in pa.table(table.get_add_actions(flatten=True)).to_pylist()]
    return sorted(found, key=lambda file: (file.date, file.lowest_seq, file.path))


def _projected(row: Mapping[str, Any]) -> ProjectedFile:
    """Others that write to the table may leave out bounds: such a file may have any event."""
    lowest, highest = row.get("min.event_seq"), row.get("max.event_seq")
    return ProjectedFile(
        unquote(row["path"]),
        str(row[f"partition.{PARTITION}"]),
        row["num_records"] or 0,
        -1 if lowest is None else lowest,
        _LAST if highest is None else highest,
    )


def rows_of(files: Any, path: str) -> Iterator[Any]:
    """The rows of a file, in batches."""
    with files.open_input_file(path) as source:
        yield from pq.ParquetFile(source, page_checksum_verification=True).iter_batches()


class ProjectionTable(LakeTable):
    """The typed table of a projection."""

    statistics, holds, partition = STATISTICS, "Rows", PARTITION

    @classmethod
    def make(cls, storage: Storage, found: Projection, name: str) -> Self:
        """Create the table unless it exists. Raises ForeignTable if it is another one."""
        cls.prepare(
            storage,
            _schema(found.columns),
            found.source,
            name,
            f"Projection {name} of stream {found.stream}, made by pgmb",
            # Others that write here, to join files, must not bring values into the table's log either.
            {"delta.dataSkippingStatsColumns": ",".join(STATISTICS)},
        )
        return cls.of(storage, found)

    @classmethod
    def of(cls, storage: Storage, found: Projection) -> Self:
        """The table as it is now."""
        table = cls.open(storage, found.source)
        table.schema = _schema(found.columns)
        return table

    def state(self, generation: int) -> State | None:
        """Where a generation stands; None: it has no commit."""
        segment = self._table.transaction_version(f"{self._source}/{generation}")
        if segment is None:
            return None
        for limit in (20, None):
            for commit in self._table.history(limit):
                if _TOLD in commit:
                    told = json.loads(commit[_TOLD])
                    return State(segment, told["lake_version"], told["rescued"], told["dropped"])
        return State(segment, -1)

    def files(self) -> list[ProjectedFile]:
        """All files, in the order of their dates and events."""
        return files_in(self._table)

    def write(
        self,
        generation: int,
        state: State,
        files: Sequence[WrittenFile],
        replaced: Sequence[ProjectedFile] = (),
        *,
        overwrite: bool = False,
    ) -> bool:
        """Commit files, and all segments of a state as projected. False if another commit came in between.

        Every commit names the projection as one application, so that two of them conflict, and its generation
        as another, whose version says where it stands.
        """
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [self._added(file) for file in files]
        actions += [RemoveAction(file.path, True, now) for file in replaced]
        told = {
            "generation": generation,
            "lake_version": state.lake_version,
            "rescued": state.rescued,
            "dropped": state.dropped,
        }
        try:
            self._table.create_write_transaction(
                actions,
                "overwrite" if overwrite else "append",
                Schema.from_arrow(self.schema),
                partition_by=[self.partition],
                commit_properties=CommitProperties(
                    app_transactions=[
                        Transaction(self._source, state.segment),
                        Transaction(f"{self._source}/{generation}", state.segment),
                    ],
                    custom_metadata={_TOLD: json.dumps(told)},
                ),
            )
        except CommitFailedError:
            if self.open(self.storage, self._source).version > self.version:
                return False
            raise
        self._follow()
        return True


def _schema(columns: Sequence[Column]) -> Any:
    return layout(columns).schema.append(pa.field(PARTITION, pa.date32(), nullable=False))


# -- The tasks -----------------------------------------------------------------------------------------------


class ProjectPart(msgspec.Struct, frozen=True):
    """A part of the lake for one task: the events with lo < seq <= hi of these files.

    date, old   only events of a date, to replace these files of the projection if their rows differ
    """

    lake: Storage
    target: Storage
    paths: list[str]
    lo: int
    hi: int
    patterns: list[str]
    columns: list[Column]
    bad: str
    file_bytes: int
    date: str | None = None
    old: list[str] = []


class ProjectedPart(msgspec.Struct, frozen=True):
    """What a task wrote, counted and saw. `fault` says why it could not read, `misfit` what did not fit.

    same   the rows are as they were: nothing was written
    """

    files: list[WrittenFile] = []
    rescued: int = 0
    dropped: int = 0
    fields: list[tuple[str, str, Seen]] = []
    fault: str | None = None
    misfit: str | None = None
    same: bool = False


def project_part(part: ProjectPart) -> ProjectedPart:
    """Write the rows of a part. The names are new in each attempt."""
    decoder = Decoder(part.columns, part.bad)
    written = layout(part.columns)
    writers: dict[int, DateWriter] = {}
    try:
        if part.old and _rows_digest(_rows(part, Decoder(part.columns, part.bad))) == _rows_digest(
            _old(part)
        ):
            return ProjectedPart(same=True)
        for rows in _rows(part, decoder):
            for day, own in by_day(rows, written.at):
                if day not in writers:
                    writers[day] = DateWriter(part.target, written, day, part.lo + 1, part.file_bytes)
                writers[day].add(own)
    except DamagedError as damaged:
        return ProjectedPart(fault=str(damaged))
    except MisfitError as misfit:
        return ProjectedPart(misfit=str(misfit))
    return ProjectedPart(
        [file for day in sorted(writers) for file in writers[day].finish()],
        decoder.rescued,
        decoder.dropped,
        [(field, kind, seen) for (field, kind), seen in sorted(decoder.seen.items())],
    )


def _rows(part: ProjectPart, decoder: Decoder) -> Iterator[Any]:
    """The rows of a part, in the order of their events."""
    matches = topics(part.patterns)
    for events in in_order(part.lake.files(), part.paths, Bounds(part.lo, part.hi)):
        seqs = events.column("seq")
        kept = pc.and_(pc.greater(seqs, part.lo), pc.less_equal(seqs, part.hi))
        if matches is not None:
            wanted = matches(pc.unique(events.column("topic")).to_pylist())
            kept = pc.and_(kept, pc.is_in(events.column("topic"), pa.array(sorted(wanted), pa.string())))
        if part.date is not None:
            days = pc.cast(events.column("published_at"), pa.date32())
            kept = pc.and_(kept, pc.equal(days, date.fromisoformat(part.date)))
        # Of an erased event a tombstone is left, which has no row.
        marked = pc.fill_null(pc.starts_with(events.column("headers"), _ERASED), False)
        erased = pc.and_(marked, pc.equal(events.column("payload"), "null"))
        for some in slices(events.filter(pc.and_not(kept, erased))):
            rows = decoder.rows(some)
            if rows.num_rows:
                yield rows


def _old(part: ProjectPart) -> Iterator[Any]:
    """The rows of a projection as they are, in the same order."""
    files = part.target.files()
    try:
        for path in part.old:
            yield from rows_of(files, path)
    except (OSError, pa.ArrowException):
        # Whatever is wrong with it: it is made again.
        return


def _rows_digest(batches: Iterable[Any]) -> tuple[int, bytes]:
    digest, rows = hashlib.sha256(), 0
    for batch in batches:
        rows += batch.num_rows
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            digest.update(repr(row).encode())
    return rows, digest.digest()


class Rebuilt(msgspec.Struct, frozen=True):
    """A part that a rebuild wrote: from these files of the lake, all events up to `hi`."""

    paths: list[str]
    hi: int
    part: ProjectedPart


class RebuildNotes:
    """What a rebuild has written and not yet committed: the next run continues one that was killed."""

    def __init__(self, storage: Storage, generation: int) -> None:
        self._storage, self._files, self._folder = storage, storage.files(), f"{_NOTES}/{generation}"

    def written(self) -> Iterator[Rebuilt]:
        """The parts whose files are all there: a vacuum may have removed some."""
        for path in self._listed(self._folder):
            with self._files.open_input_file(path) as source:
                try:
                    found = msgspec.msgpack.decode(source.read(), type=list[Rebuilt])
                except msgspec.DecodeError:
                    # Its writer was killed.
                    continue
            yield from (one for one in found if self._are_there(one.part.files))

    def note(self, parts: Sequence[Rebuilt]) -> None:
        path = f"{self._folder}/{uuid.uuid4()}"
        self._storage.make_folder(path)
        with self._files.open_output_stream(path) as sink:
            sink.write(msgspec.msgpack.encode(parts))
        self._storage.flush(path)

    def forget(self) -> None:
        """Remove the notes of all rebuilds of the table."""
        for path in self._listed(_NOTES):
            self._files.delete_file(path)

    def _listed(self, folder: str) -> list[str]:
        chosen = pafs.FileSelector(folder, allow_not_found=True, recursive=True)
        return [one.path for one in self._files.get_file_info(chosen) if one.is_file]

    def _are_there(self, files: Sequence[WrittenFile]) -> bool:
        found: list[Any] = self._files.get_file_info([file.path for file in files]) if files else []
        return all(one.is_file and one.size == file.bytes for one, file in zip(found, files, strict=True))


# -- The projector -------------------------------------------------------------------------------------------


class Projected(msgspec.Struct, frozen=True):
    """A commit. segment: up to which all events are projected; renewed: rows of replaced files of the lake
    that were made again."""

    segment: int
    rows: int
    rescued: int
    dropped: int
    files: int
    table_version: int
    renewed: bool = False


class Projector:
    """Keeps the table of a projection up to date.

    run       runs tasks, see `pgmb.lake.spark`
    options   of the storage, by the names of `deltalake`
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        run: Run,
        *,
        options: Mapping[str, str] | None = None,
        sizes: ProjectionSizes | None = None,
    ) -> None:
        self._dsn, self.name, self._run, self._options = dsn, name, run, options
        self._sizes = sizes or ProjectionSizes()

    def run(self, *, rebuild: bool = False) -> Iterator[Projected]:
        """Project what is archived, commit by commit. Yields nothing while another projector is at work.

        rebuild   replace all rows, in one commit. A run that was killed is continued

        Raises Conflict if the declaration changed and the table has to be rebuilt, InvalidArgument for a
        payload that does not fit where that is to fail.
        """
        with self._alone() as database:
            if database is not None:
                yield from self._advance(database, rebuild=rebuild)

    def _advance(self, database: psycopg.Connection[Any], *, rebuild: bool = False) -> Iterator[Projected]:
        """The same, while this projector has the lock."""
        conflicts = 0
        while conflicts < _MOST_CONFLICTS:
            found = self.find(database)
            lake, table = self.open(found)
            state = table.state(found.generation)
            if state is None and not rebuild and table.files():
                changed = Conflict(f"the declaration of projection {self.name} has changed")
                changed.advise(f"Rebuild the table: pgmb lake project backfill {self.name}")
                raise changed
            try:
                done = (
                    self.project(database, found, lake, table, None, rebuild=True)
                    if rebuild
                    else self.renew(database, found, lake, table, state)
                    or self.project(database, found, lake, table, state)
                )
            except VerificationFailed:
                # Files that were erased or joined and removed, while tasks read them.
                if self.open(found)[0].version == lake.version:
                    raise
                done = False
            if isinstance(done, Projected):
                rebuild = False
                yield done
            elif done is None:
                # What a run before this one committed and did not record.
                if state is not None:
                    self.record(database, found, table, state)
                return
            else:
                conflicts += 1
        busy = Conflict(f"the table of projection {self.name} changes all the time")
        busy.advise("Stop what else writes to it, and try again.")
        raise busy

    def waits(self) -> bool:
        """Whether a run would find something to do."""
        with connect(self._dsn, "pgmb lake") as database, translated():
            found = self.find(database)
        lake, table = self.open(found)
        state = table.state(found.generation)
        if state is None:
            return found.upto is not None
        return found.end > _end(state.segment) or (
            lake.version > state.lake_version and bool(self.replaced(lake, state))
        )

    def vacuum(self, hours: int, *, dry_run: bool = False) -> list[str]:
        """Remove files that belong to no version of the table of the last hours. Raises Conflict if a
        projector is at work: its files belong to no version yet."""
        with self._only() as database:
            _, table = self.open(self.find(database))
            return table.vacuum(hours, dry_run=dry_run)

    def follow_erasure(self) -> None:
        """Take rows of erased events out of the table, and remove all files that it does not list. Nothing
        else is projected: a payload that does not fit must not stop an erasure. Raises Conflict if a
        projector is at work."""
        with self._only() as database:
            for _ in range(_MOST_CONFLICTS):
                found = self.find(database)
                lake, table = self.open(found)
                state = table.state(found.generation)
                if state is None and table.files():
                    # Rows of another declaration, which cannot be compared: the next run makes all rows.
                    self.commit(table, found, State(-1, lake.version), [], overwrite=True)
                elif self.renew(database, found, lake, table, state) is None:
                    table.vacuum(0, dry_run=False)
                    return
            raise Conflict(f"the table of projection {self.name} changes all the time")

    # -- The steps -------------------------------------------------------------------------------------------

    def lock(self, database: psycopg.Connection[Any]) -> bool:
        """Whether this projector is the only one. That saves work; the table's commits are what is safe."""
        deadline = time.monotonic() + _LAST_SESSION_SECONDS
        while database.execute(_LOCK, [self.name]).fetchone() != (True,):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def find(self, database: psycopg.Connection[Any]) -> Projection:
        return _find(database, self.name)

    def open(self, found: Projection) -> tuple[EventTable, ProjectionTable]:
        """The table of the stream and that of the projection, as they are now."""
        if found.lake_url is None:
            raise ForeignTable(f"stream {found.stream} has no lake any more")
        return (
            EventTable.open(Storage.at(found.lake_url, self._options), found.lake_source),
            ProjectionTable.of(Storage.at(found.url, self._options), found),
        )

    def project(
        self,
        database: psycopg.Connection[Any],
        found: Projection,
        lake: EventTable,
        table: ProjectionTable,
        state: State | None,
        *,
        rebuild: bool = False,
    ) -> Projected | bool | None:
        """Project the next segments. None: there are none; False: another commit came first."""
        lo = -1 if state is None else _end(state.segment)
        upto = found.upto
        if upto is None or found.end <= lo:
            return None
        chosen, upto = self.choose(lake.files(lo, found.end), upto, rebuild)
        if rebuild:
            written = self.rebuild(found, lake, table, chosen, _end(upto))
        else:
            shared = self._shared(chosen)
            parts = [self._part(found, lake, table, files, lo, _end(upto)) for files in shared]
            written = self.write(found, parts)
        begun = state or State(-1, 0)
        following = State(
            upto,
            lake.version,
            begun.rescued + sum(one.rescued for one in written),
            begun.dropped + sum(one.dropped for one in written),
        )
        self.record_fields(database, found, written)
        files = [file for one in written for file in one.files]
        if not self.commit(table, found, following, files, overwrite=state is None):
            return False
        if rebuild:
            RebuildNotes(table.storage, found.generation).forget()
        return self.record(database, found, table, following, files)

    def rebuild(
        self,
        found: Projection,
        lake: EventTable,
        table: ProjectionTable,
        chosen: Sequence[Sequence[KnownFile]],
        hi: int,
    ) -> list[ProjectedPart]:
        """Write the rows of all events up to `hi`, as many at a time as a commit would have, and note what
        was written: a run that was killed is continued. Parts whose files of the lake were replaced since,
        by an erasure for example, are written again."""
        notes = RebuildNotes(table.storage, found.generation)
        known = {file.path: file for group in chosen for file in group}
        committed = {file.path for file in table.files()}
        done: list[ProjectedPart] = []
        taken: set[str] = set()
        for one in notes.written():
            if (
                taken.isdisjoint(one.paths)
                and committed.isdisjoint(file.path for file in one.part.files)
                and all(path in known and known[path].highest_seq <= one.hi for path in one.paths)
            ):
                done.append(one.part)
                taken.update(one.paths)
        rest = [[file for file in group if file.path not in taken] for group in chosen]
        waves = self._waves(self._shared([group for group in rest if group]))
        for number, wave in enumerate(waves, 1):
            parts = [self._part(found, lake, table, files, -1, hi) for files in wave]
            written = self.write(found, parts)
            done += written
            if number < len(waves):
                notes.note([Rebuilt(part.paths, hi, one) for part, one in zip(parts, written, strict=True)])
        return done

    def renew(
        self,
        database: psycopg.Connection[Any],
        found: Projection,
        lake: EventTable,
        table: ProjectionTable,
        state: State | None,
    ) -> Projected | bool | None:
        """Make rows again whose events' files in the lake were replaced since: erased, joined or repaired.

        None: there are none; False: another commit came first.
        """
        if state is None or lake.version <= state.lake_version:
            return None
        gone = self.replaced(lake, state)
        if not gone:
            return None
        now = lake.files(-1, _end(state.segment))
        groups = [
            group
            for group in _of_one_date(table.files())
            if any(
                file.lowest_seq <= one.highest_seq and file.highest_seq >= one.lowest_seq
                for file in group
                for one in gone
            )
        ]
        parts = [self._renewal(found, lake, table, group, now, _end(state.segment)) for group in groups]
        written = self.write(found, parts)
        changed = [(group, one) for group, one in zip(groups, written, strict=True) if not one.same]
        files = [file for _, one in changed for file in one.files]
        following = state._replace(lake_version=lake.version)
        if not self.commit(table, found, following, files, [file for group, _ in changed for file in group]):
            return False
        return self.record(database, found, table, following, files, renewed=True)

    def replaced(self, lake: EventTable, state: State) -> list[KnownFile]:
        """The files of projected segments that the lake had when they were read, and has not any more."""
        now = {file.path for file in lake.files(-1, _end(state.segment))}
        try:
            before = DeltaTable(
                lake.storage.url, version=max(0, state.lake_version), storage_options=lake.storage.options
            )
        except DeltaError:
            before = None
        if before is None or state.lake_version < 0:
            # The log of that version is gone: any file may have been replaced.
            return [KnownFile("", 0, -1, _end(state.segment))]
        return [file for file in files_of(before, -1, _end(state.segment)) if file.path not in now]

    def choose(
        self, files: Sequence[KnownFile], upto: int, everything: bool
    ) -> tuple[list[list[KnownFile]], int]:
        """Groups of files for one commit, and the last segment that they complete."""
        groups = list(overlapping(files))
        size = 0
        for number, group in enumerate(groups[:-1], 1):
            size += sum(file.bytes for file in group)
            last = max(file.highest_seq for file in group) >> SEGMENT_BITS
            following = groups[number][0].lowest_seq >> SEGMENT_BITS
            if size >= self._sizes.commit_bytes and following > last and not everything:
                return groups[:number], following - 1
        return groups, upto

    def write(self, found: Projection, parts: Sequence[ProjectPart]) -> list[ProjectedPart]:
        """Write rows to files that belong to no table yet."""
        written = self._run(project_part, parts, ProjectedPart) if parts else []
        for one in written:
            if one.fault is not None:
                lost = VerificationFailed(f"the table at {found.lake_url} cannot be read: {one.fault}")
                lost.advise("Run `pgmb lake verify`. If files were replaced meanwhile, try again.")
                raise lost
            if one.misfit is not None:
                misfit = InvalidArgument(f"a payload does not fit projection {self.name}: {one.misfit}")
                misfit.advise("Declare it with --bad rescue or --bad drop, or with other columns.")
                raise misfit
        return written

    def commit(
        self,
        table: ProjectionTable,
        found: Projection,
        state: State,
        files: Sequence[WrittenFile],
        replaced: Sequence[ProjectedFile] = (),
        *,
        overwrite: bool = False,
    ) -> bool:
        """Commit what was written. False if another commit came first."""
        return table.write(found.generation, state, files, replaced, overwrite=overwrite)

    def record(
        self,
        database: psycopg.Connection[Any],
        found: Projection,
        table: ProjectionTable,
        state: State,
        files: Sequence[WrittenFile] = (),
        *,
        renewed: bool = False,
    ) -> Projected:
        """Tell the database where the table stands, for those who look."""
        rows = sum(file.rows for file in table.files())
        database.execute(
            _RECORD,
            [
                *(self.name, found.generation, state.segment, state.lake_version, table.version),
                *(rows, state.rescued, state.dropped),
            ],
        )
        return Projected(
            state.segment, rows, state.rescued, state.dropped, len(files), table.version, renewed
        )

    def record_fields(
        self, database: psycopg.Connection[Any], found: Projection, written: Sequence[ProjectedPart]
    ) -> None:
        """Tell the database which fields payloads had. Before the commit: it can be repeated."""
        fields = [field for one in written for field in one.fields]
        if not fields:
            return
        names, kinds, seen = zip(*fields, strict=True)
        database.execute(
            _RECORD_FIELDS,
            [
                *(self.name, found.generation, list(names), list(kinds)),
                *([one.first_seq for one in seen], [one.last_seq for one in seen]),
                *([_time(one.first_at) for one in seen], [_time(one.last_at) for one in seen]),
            ],
        )

    @contextmanager
    def _alone(self) -> Generator[psycopg.Connection[Any] | None]:
        with connect(self._dsn, "pgmb lake") as database, translated():
            yield database if self.lock(database) else None

    @contextmanager
    def _only(self) -> Generator[psycopg.Connection[Any]]:
        with self._alone() as database:
            if database is None:
                busy = Conflict(f"a projector works on {self.name}")
                busy.advise("Try again when it has finished, or stop `pgmb lake project run --follow`.")
                raise busy
            yield database

    def _shared(self, groups: Sequence[Sequence[KnownFile]]) -> list[list[KnownFile]]:
        """Groups of files for tasks: small ones together."""
        total = sum(file.bytes for group in groups for file in group)
        size = min(self._sizes.file_bytes, total // max(self._run.parallelism, 1))
        shared: list[list[KnownFile]] = []
        for group in groups:
            if not shared or sum(file.bytes for file in shared[-1]) >= size:
                shared.append([])
            shared[-1] += group
        return shared

    def _waves(self, shared: Sequence[list[KnownFile]]) -> list[list[list[KnownFile]]]:
        """Groups of files for tasks, together as large as a commit."""
        waves: list[list[list[KnownFile]]] = []
        size = 0
        for files in shared:
            if not waves or size >= self._sizes.commit_bytes:
                waves.append([])
                size = 0
            waves[-1].append(files)
            size += sum(file.bytes for file in files)
        return waves

    def _part(
        self,
        found: Projection,
        lake: EventTable,
        table: ProjectionTable,
        files: Sequence[KnownFile],
        lo: int,
        hi: int,
    ) -> ProjectPart:
        return ProjectPart(
            lake.storage,
            table.storage,
            [file.path for file in files],
            lo,
            hi,
            found.patterns,
            found.columns,
            found.bad,
            self._sizes.file_bytes,
        )

    def _renewal(
        self,
        found: Projection,
        lake: EventTable,
        table: ProjectionTable,
        group: Sequence[ProjectedFile],
        now: Sequence[KnownFile],
        end: int,
    ) -> ProjectPart:
        lo = max(-1, min(file.lowest_seq for file in group) - 1)
        hi = min(end, max(file.highest_seq for file in group))
        files = [file for file in now if file.highest_seq > lo and file.lowest_seq <= hi]
        part = self._part(found, lake, table, files, lo, hi)
        return msgspec.structs.replace(part, date=group[0].date, old=[file.path for file in group])


def _of_one_date(files: Sequence[ProjectedFile]) -> Iterator[list[ProjectedFile]]:
    """Files of a date whose events overlap, to be replaced together."""
    group: list[ProjectedFile] = []
    for file in files:
        if group and (file.date != group[0].date or file.lowest_seq > max(one.highest_seq for one in group)):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _end(segment: int) -> int:
    return ((segment + 1) << SEGMENT_BITS) - 1


def _time(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
