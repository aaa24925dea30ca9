"""A projection as a table in Spark: `.option("projection", "orders")`. Executors read files with Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from pgmb.spark.options import SparkOptions, lake_options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

PROJECTION_OPTIONS: Final = ("url", "projection", "version", "lakeOptions")


class FileRead(msgspec.Struct, frozen=True):
    """A file of a projection: everything that an executor needs to read it."""

    url: str
    options: dict[str, str]
    path: str
    date: str


class FilePartition(InputPartition):
    """A file, as Spark sends it to an executor."""

    def __init__(self, file: FileRead) -> None:
        super().__init__(file)


class _Opened:
    """The table that options name."""

    def __init__(self, options: Mapping[str, str]) -> None:
        given = SparkOptions(options, PROJECTION_OPTIONS)
        url, name = given.text("url"), given.text("projection")
        if not url or not name:
            raise ValueError('reading a projection needs .option("url", "postgresql://…")')
        version = given.text("version")
        if version is not None and not version.strip().isdecimal():
            raise ValueError(f"version must be a number of at least 0, got {version!r}")
        try:
            from pgmb.lake.projection.declaration import find
            from pgmb.lake.projection.table import files_in, opened
        except ImportError as error:
            error.add_note('Install what reads the lake: pip install "pgmb[lake]".')
            raise
        self.options = lake_options(given)
        self.found = find(url, name)
        self.table = opened(
            self.found, version=None if version is None else int(version), options=self.options
        )
        self.files = files_in(self.table)


def schema_of(options: Mapping[str, str]) -> StructType:
    """The columns of the table that options name."""
    stored: Any = _Opened(options).table.schema()
    # Spark compares columns with the batches that it gets, which are nullable.
    return from_arrow_schema(pa.schema([field.with_nullable(True) for field in pa.schema(stored.to_arrow())]))


class ProjectionReader(DataSourceReader):
    """The rows of a projection, as of its newest version, or of `version`."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options, self._names = dict(options), schema.fieldNames()

    def partitions(self) -> Sequence[InputPartition]:
        found = _Opened(self._options)
        return [
            FilePartition(FileRead(found.found.url, found.options, file.path, file.date))
            for file in found.files
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a file. Called on an executor."""
        from pgmb.lake.projection.table import rows_of
        from pgmb.lake.storage import Storage

        file: FileRead = partition.value
        day = pa.scalar(date.fromisoformat(file.date), pa.date32())
        for rows in rows_of(Storage(file.url, file.options).files(), file.path):
            columns = [
                rows.column(name) if name in rows.schema.names else pa.repeat(day, rows.num_rows)
                for name in self._names
            ]
            yield pa.RecordBatch.from_arrays(columns, names=self._names)
