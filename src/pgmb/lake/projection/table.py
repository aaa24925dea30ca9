"""The Delta table of a projection: its rows, and in its commits where it stands."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import msgspec
import pyarrow
import pyarrow.parquet
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction
from psycopg.types.json import Jsonb

from pgmb._core.connecting import connect
from pgmb.errors import ForeignTable, translated
from pgmb.lake.delta import LakeTable, own_path
from pgmb.lake.projection.columns import (
    PARTITION,
    STATISTICS,
    Column,
    Decoder,
    checked,
    layout,
)
from pgmb.lake.projection.declaration import Declaration, Projection, found_in
from pgmb.lake.storage import Storage
from pgmb.lake.task import WrittenFile

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

_TOLD: Final = "pgmb"
_LAST: Final = 1 << 62
_CREATE: Final = "select pgmb.create_projection(%s, %s, %s, %s, bad => %s, url => %s, replace => %s)"


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
        found = found_in(database, declared.name)
        # Last: if the table cannot be had, the database is left as it was.
        ProjectionTable.make(Storage.at(found.url, options), found, declared.name)
    return found.url


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
        own_path(row["path"]),
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
