"""The lake: history of streams in open tables, which pgmb writes, verifies and lets others read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["table"]


def table(
    dsn: str, name: str, *, version: int | None = None, options: Mapping[str, str] | None = None
) -> Any:
    """The table of a projection as an Arrow dataset, which DuckDB, Polars and others query.

    version   of the table; None: the newest
    options   of the storage, by the names of `deltalake`
    """
    # Imported here: tasks of Spark and readers of the lake import this package, and need no projections.
    from pgmb.lake.projection.declaration import find
    from pgmb.lake.projection.table import opened

    found: Any = opened(find(dsn, name), version=version, options=options)
    return found.to_pyarrow_dataset()
