"""Keeping the table of a projection up to date: plan → write → commit → record."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import psycopg
import pyarrow
import pyarrow.fs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from pgmb._core.connecting import connect, session
from pgmb.errors import Conflict, ForeignTable, InvalidArgument, VerificationFailed, translated
from pgmb.lake.archive import Run
from pgmb.lake.delta import EventTable, KnownFile, files_of, overlapping
from pgmb.lake.projection.declaration import Projection, end_of, found_in
from pgmb.lake.projection.table import ProjectedFile, ProjectionTable, State
from pgmb.lake.projection.task import ProjectedPart, ProjectPart, project_part
from pgmb.lake.storage import Storage
from pgmb.lake.task import WrittenFile
from pgmb.spark.source.offsets import SEGMENT_BITS

# The stubs of pyarrow are incomplete.
pafs: Any = pyarrow.fs

_MEGABYTE: Final = 1024 * 1024
_MOST_CONFLICTS: Final = 10
_NOTES: Final = "_pgmb_rebuild"
"""The folder beside the files of a table in which a rebuild notes what it has written."""
_LOCK: Final = "select pgmb.lock_projection(%s)"
_RECORD: Final = "select pgmb.record_projection(%s, %s, %s, %s, %s, %s, %s, %s)"
_RECORD_FIELDS: Final = "select pgmb.record_fields(%s, %s, %s, %s, %s, %s, %s, %s)"


class ProjectionSizes(msgspec.Struct, frozen=True):
    """file_bytes: after which a file is complete; commit_bytes: of the lake, after which to commit."""

    file_bytes: int = 192 * _MEGABYTE
    commit_bytes: int = 4096 * _MEGABYTE


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
        return found.end > end_of(state.segment) or (
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
        return database.execute(_LOCK, [self.name]).fetchone() == (True,)

    def find(self, database: psycopg.Connection[Any]) -> Projection:
        return found_in(database, self.name)

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
        lo = -1 if state is None else end_of(state.segment)
        upto = found.upto
        if upto is None or found.end <= lo:
            return None
        chosen, upto = self.choose(lake.files(lo, found.end), upto, rebuild)
        if rebuild:
            written = self.rebuild(found, lake, table, chosen, end_of(upto))
        else:
            shared = self._shared(chosen)
            parts = [self._part(found, lake, table, files, lo, end_of(upto)) for files in shared]
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
        now = lake.files(-1, end_of(state.segment))
        groups = [
            group
            for group in _of_one_date(table.files())
            if any(
                file.lowest_seq <= one.highest_seq and file.highest_seq >= one.lowest_seq
                for file in group
                for one in gone
            )
        ]
        parts = [self._renewal(found, lake, table, group, now, end_of(state.segment)) for group in groups]
        written = self.write(found, parts)
        changed = [(group, one) for group, one in zip(groups, written, strict=True) if not one.same]
        files = [file for _, one in changed for file in one.files]
        following = state._replace(lake_version=lake.version)
        if not self.commit(table, found, following, files, [file for group, _ in changed for file in group]):
            return False
        return self.record(database, found, table, following, files, renewed=True)

    def replaced(self, lake: EventTable, state: State) -> list[KnownFile]:
        """The files of projected segments that the lake had when they were read, and has not any more."""
        now = {file.path for file in lake.files(-1, end_of(state.segment))}
        try:
            before = DeltaTable(
                lake.storage.url, version=max(0, state.lake_version), storage_options=lake.storage.options
            )
        except DeltaError:
            before = None
        if before is None or state.lake_version < 0:
            # The log of that version is gone: any file may have been replaced.
            return [KnownFile("", 0, -1, end_of(state.segment))]
        return [file for file in files_of(before, -1, end_of(state.segment)) if file.path not in now]

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
        with session(self._dsn, "pgmb lake") as database:
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


def _time(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
