"""A stream's table in the lake: a Delta table. Another format has to offer what `EventTable` does."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple, Self
from urllib.parse import unquote

import pyarrow
import pyarrow.compute
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from pgmb.errors import ForeignTable
from pgmb.lake.digest import BLOCK_BITS
from pgmb.lake.events import STATISTICS, TABLE_SCHEMA
from pgmb.lake.storage import Storage
from pgmb.lake.task import WrittenFile

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_SOURCE: Final = "pgmb.source"
"""The table's property that says which stream of which installation writes it."""
_FILE_COLUMNS: Final = [
    *("path", "size_bytes", "min.seq", "max.seq", "min.xid", "max.xid"),
    *("min.published_at", "max.published_at"),
]
_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# Bounds of times may be cut to milliseconds.
_ROUNDED: Final = timedelta(milliseconds=1)
# Commits say what segments must hold. By default Delta forgets them after 30 days.
_LOG_KEPT: Final = "interval 3650 days"
_OWN_FILE: Final = r"(?:\d+|erased)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.parquet"
"""The names of the files that writers of pgmb make."""
_TOLD: Final = "pgmb"
"""The field of a commit that names its segments."""


class KnownFile(NamedTuple):
    """A file of the table, with the bounds of its events."""

    path: str
    bytes: int
    lowest_seq: int
    highest_seq: int
    lowest_xid: int = 0
    highest_xid: int = 1 << 62
    first_at: int = -(1 << 62)
    """No event was published before this, in microseconds since 1970."""
    last_at: int = 1 << 62


class LakeTable:
    """A table of a stream, as of its version when this was opened or last committed to."""

    schema: Any
    statistics: ClassVar[tuple[str, ...]]
    """The columns whose bounds the table knows."""
    holds: ClassVar[str]
    partition: ClassVar[str] = "date"

    def __init__(self, storage: Storage, source: str, table: DeltaTable) -> None:
        self.storage, self._source, self._table = storage, source, table

    @classmethod
    def create(cls, storage: Storage, source: str, stream: str) -> Self:
        """Create the table unless it exists. Raises ForeignTable if it is another stream's."""
        cls.prepare(storage, cls.schema, source, stream, f"{cls.holds} of stream {stream}, archived by pgmb")
        return cls.open(storage, source)

    @classmethod
    def prepare(
        cls,
        storage: Storage,
        schema: Any,
        source: str,
        name: str,
        description: str,
        configuration: Mapping[str, str] | None = None,
    ) -> None:
        """Create a table unless there is one. Raises ForeignTable if the place is not empty, or lies in the
        folder of another table."""
        if not DeltaTable.is_deltatable(storage.url, storage.options):
            _assert_vacant(storage)
        if storage.folder is not None:
            storage.folder.mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            storage.url,
            Schema.from_arrow(schema),
            mode="ignore",
            partition_by=[cls.partition],
            name=name,
            description=description,
            configuration={
                _SOURCE: source,
                "delta.logRetentionDuration": _LOG_KEPT,
                **(configuration or {}),
            },
            storage_options=storage.options,
            raise_if_key_not_exists=False,
        )

    @classmethod
    def open(cls, storage: Storage, source: str) -> Self:
        """The table as it is now. Raises ForeignTable if there is none, or it is another stream's."""
        try:
            table = DeltaTable(storage.url, storage_options=storage.options)
        except TableNotFoundError as error:
            gone = ForeignTable(f"there is no table at {storage.url}")
            gone.advise("Create it with `pgmb lake init`, or bring back what was removed there.")
            raise gone from error
        if table.metadata().configuration.get(_SOURCE) != source:
            foreign = ForeignTable(f"the table at {storage.url} belongs to another stream or database")
            foreign.advise("Name another URL. A copy of a database must not write to the original's table.")
            raise foreign
        return cls(storage, source, table)

    @property
    def delta(self) -> DeltaTable:
        return self._table

    @property
    def version(self) -> int:
        """The version of the table as a whole."""
        return self._table.version()

    @property
    def committed(self) -> int:
        """The last segment or batch that was committed; -1: none."""
        found = self._table.transaction_version(self._source)
        return -1 if found is None else found

    def commit(
        self,
        number: int,
        files: Sequence[WrittenFile],
        metadata: dict[str, Any],
        replaced: Sequence[KnownFile] = (),
    ) -> bool:
        """Add files, and note all segments up to this one as committed. False if another archiver was first.

        Whether the table holds the segment already is decided by the state that this object has, and the
        table refuses the commit if another one of the same source came after that state.
        """
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [self._added(file) for file in files]
        actions += [RemoveAction(file.path, True, now) for file in replaced]
        try:
            self._table.create_write_transaction(
                actions,
                "append",
                Schema.from_arrow(self.schema),
                partition_by=[self.partition],
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(self._source, number)],
                    custom_metadata={_TOLD: json.dumps(metadata)},
                ),
            )
        except CommitFailedError:
            # The other one may have committed fewer segments, or more.
            if self.open(self.storage, self._source).committed > self.committed:
                return False
            raise
        self._follow()
        return True

    def rewrite(self, files: Sequence[WrittenFile], replaced: Sequence[KnownFile]) -> None:
        """Replace files by others with the same events. Raises CommitFailedError if one is gone already."""
        now = time.time_ns() // 1_000_000
        self._table.create_write_transaction(
            [
                *(self._added(file, data_change=False) for file in files),
                *(RemoveAction(file.path, False, now) for file in replaced),
            ],
            "append",
            Schema.from_arrow(self.schema),
            partition_by=[self.partition],
        )
        self._follow()

    def _follow(self) -> None:
        """Go on to the newest version, and bring what was committed to disk."""
        before = self.version
        self._table.update_incremental()
        if self.storage.folder is not None:
            self.storage.flush(*(f"_delta_log/{n:020}.json" for n in range(before + 1, self.version + 1)))

    def vacuum(self, hours: int, *, dry_run: bool) -> list[str]:
        """Remove files that belong to no version of the last hours: those that a version has replaced, and
        those of killed writers, which are known by their names. Files of others are left. Returns the paths.
        """
        replaced = self._table.vacuum(hours, dry_run=True, enforce_retention_duration=False)
        unlisted = self._table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        own = re.compile(rf"{re.escape(self.partition)}=[^/]+/{_OWN_FILE}")
        files = self.storage.files()
        paths = sorted({*replaced, *(path for path in unlisted if own.fullmatch(path))})
        # Delta names files that an earlier call removed, too.
        found = [entry.path for entry in files.get_file_info(paths) if entry.is_file]
        if not dry_run:
            for path in found:
                files.delete_file(path)
        return found

    def told(self) -> dict[int, dict[str, Any]]:
        """What commits say of segments: epoch, events and digest, the newest commit of each."""
        found: dict[int, dict[str, Any]] = {}
        for commit in self._table.history():
            if _TOLD in commit:
                said = json.loads(commit[_TOLD])
                for one in said["segments"]:
                    found.setdefault(one["segment"], {"epoch": said.get("epoch"), **one})
        return found

    def _added(self, file: WrittenFile, *, data_change: bool = True) -> AddAction:
        statistics = {
            "numRecords": file.rows,
            "minValues": file.lowest,
            "maxValues": file.highest,
            "nullCount": dict.fromkeys(self.statistics, 0),
        }
        return AddAction(
            path=file.path,
            size=file.bytes,
            partition_values={self.partition: file.date},
            modification_time=file.written_at,
            data_change=data_change,
            stats=json.dumps(statistics),
        )


class EventTable(LakeTable):
    """The events of a stream."""

    schema, statistics, holds = TABLE_SCHEMA, STATISTICS, "Events"

    def files(self, lo: int, hi: int) -> list[KnownFile]:
        """The files that may hold events with lo < seq <= hi, in the order of seq."""
        return files_of(self._table, lo, hi)


def _assert_vacant(storage: Storage) -> None:
    for outer in storage.above():
        if DeltaTable.is_deltatable(outer, storage.options):
            nested = ForeignTable(f"{storage.url} lies in the folder of the table at {outer}")
            nested.advise(
                "Name a folder of its own: whoever cares for that table may delete other files there."
            )
            raise nested
    found = storage.first_file()
    if found is not None:
        occupied = ForeignTable(f"{storage.url} is not empty: it holds {found}")
        occupied.advise("Name an empty folder. A table takes all of its folder.")
        raise occupied


def own_path(path: str) -> str:
    """A path of a table's log, decoded. Raises ForeignTable if it leads out of the table's folder."""
    decoded = unquote(path)
    if ".." in decoded.split("/") or decoded.startswith("/") or "://" in decoded:
        raise ForeignTable(f"the table's log names a file outside of the table's folder: {decoded!r}")
    return decoded


def files_in(table: LakeTable) -> list[str]:
    """The paths of all files of a table."""
    found = pa.table(table.delta.get_add_actions(flatten=True)).select(["path"]).to_pylist()
    return sorted(own_path(row["path"]) for row in found)


def files_of(table: DeltaTable, lo: int, hi: int) -> list[KnownFile]:
    """The files of a table that may hold events with lo < seq <= hi, in the order of seq."""
    return files_within(listed_files(table), lo, hi)


def listed_files(table: DeltaTable) -> Any:
    """All files of a table as Arrow columns. A table may have a hundred thousand: a Python object for each
    takes longer than to open the table."""
    return pa.table(table.get_add_actions(flatten=True)).select(_FILE_COLUMNS)


def files_within(listed: Any, lo: int, hi: int) -> list[KnownFile]:
    """Those that may hold events with lo < seq <= hi, in the order of seq."""
    reaching = pc.and_(pc.greater(listed["max.seq"], lo), pc.less_equal(listed["min.seq"], hi))
    found = listed.filter(reaching)
    return sorted(map(_known, found.to_pylist()), key=lambda file: (file.lowest_seq, file.path))


def _known(row: dict[str, Any]) -> KnownFile:
    known = KnownFile(
        own_path(row["path"]),
        row["size_bytes"],
        row["min.seq"],
        row["max.seq"],
        row["min.xid"],
        row["max.xid"],
    )
    first, last = row["min.published_at"], row["max.published_at"]
    if first is None or last is None:
        return known
    return known._replace(
        first_at=(first - _BEGIN) // _MICROSECOND, last_at=(last + _ROUNDED - _BEGIN) // _MICROSECOND
    )


def overlapping(files: Iterable[KnownFile]) -> Generator[list[KnownFile]]:
    """Files in groups whose blocks of events have none in common, each to be read by one task."""
    group: list[KnownFile] = []
    last = -1
    for file in sorted(files, key=lambda file: file.lowest_seq):
        if group and file.lowest_seq >> BLOCK_BITS > last:
            yield group
            group, last = [], -1
        group.append(file)
        last = max(last, file.highest_seq >> BLOCK_BITS)
    if group:
        yield group
