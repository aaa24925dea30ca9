"""`format("pgmb")` for PySpark, which imports every module named `pyspark_*` to find its `DefaultSource`.

Whoever has both pays for this import in every session, so it loads nothing but a class of PySpark's; what the
extra brings is asked for only once the format is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """A stream of events as a table, read and written, at rest and in motion."""

    @classmethod
    def name(cls) -> str:
        return "pgmb"

    def schema(self) -> StructType | str:
        if "projection" in self.options:
            columns: StructType = _part("source.projection").schema_of(self.options)
            return columns
        return str(_part("source.queries").SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        reader: DataSourceReader = (
            _part("source.projection").ProjectionReader(self.options, schema)
            if "projection" in self.options
            else _part("source.readers").BatchReader(self.options, schema)
        )
        return reader

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        reader: DataSourceStreamReader = _part("source.readers").StreamReader(self.options, schema)
        return reader

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        writer: DataSourceWriter = _part("sink.writers").BatchWriter(self.options, schema, overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        writer: DataSourceStreamWriter = _part("sink.writers").StreamWriter(self.options, schema, overwrite)
        return writer


def _part(name: str) -> Any:
    """A module of `pgmb.spark`, or an error that says what to install."""
    try:
        for needed in ("pyarrow", "adbc_driver_postgresql", "pyspark.sql.streaming.datasource"):
            import_module(needed)
        return import_module(f"pgmb.spark.{name}")
    except ImportError as missing:
        raise ImportError(
            'format("pgmb") needs PySpark 4.2 or later with pyarrow, pandas and ADBC for PostgreSQL, '
            f'on the driver and on every executor: pip install "pgmb[spark]" ({missing})',
            name=missing.name,
        ) from missing
