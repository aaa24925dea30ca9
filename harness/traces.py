"""Search for values in what a database and a lake keep on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg


def in_database(db: psycopg.Connection[Any], values: Sequence[str]) -> dict[str, list[str]]:
    """The files of the database that have one of these values, each with the values, by their bytes.

    Reads every file of the database: tables, TOAST tables, indexes, statistics. The server runs here.
    """
    db.execute("checkpoint")
    row = db.execute(
        "select current_setting('data_directory') || '/base/' || oid from pg_database"
        " where datname = current_database()"
    ).fetchone()
    assert row is not None
    names = {
        str(path).rsplit("/", 1)[-1]: f"{name}"
        for name, path in db.execute(
            "select oid::regclass, pg_relation_filepath(oid) from pg_class where relfilenode > 0"
        )
    }
    found: dict[str, list[str]] = {}
    for file in sorted(Path(row[0]).iterdir()):
        if file.is_file() and (held := in_bytes([file.read_bytes()], values)):
            found[names.get(file.name, file.name)] = held
    return found


def in_bytes(parts: Iterable[bytes], values: Sequence[str]) -> list[str]:
    """Those of the values that are in one of the parts."""
    contents = list(parts)
    return [value for value in values if any(value.encode() in content for content in contents)]


def in_lake(folders: Iterable[Path], values: Sequence[str]) -> dict[str, list[str]]:
    """The files under folders that have one of these values, in their bytes or in a column of Parquet.

    All files count, whether a table lists them or not.
    """
    found: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and (held := in_bytes([file.read_bytes(), *_columns(file)], values)):
                found[str(file.relative_to(folder.parent))] = held
    return found


def _columns(file: Path) -> Iterator[bytes]:
    """The texts of a Parquet file, which is compressed."""
    if file.suffix != ".parquet":
        return
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file).read()
    for column in table.columns:
        if str(column.type) in ("string", "large_string"):
            yield "\n".join(value for value in column.to_pylist() if value is not None).encode()
