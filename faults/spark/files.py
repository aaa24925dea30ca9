"""What Spark's file sink holds: the files that its own log names, by batch, and no other in the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq

COMPACT = ".compact"


def batches(folder: Path) -> list[tuple[int, list[Path]]]:
    """The batches that were written to the end, each with its files.

    A compacted entry of Spark's log repeats the files of all entries before it, which then may be gone: those
    count for its own batch.
    """
    log = folder / "_spark_metadata"
    if not log.exists():
        return []
    entries = sorted(
        (int(path.name.removesuffix(COMPACT)), path)
        for path in log.iterdir()
        if path.name.removesuffix(COMPACT).isdigit()
    )
    found: dict[Path, int] = {}
    for number, path in entries:
        for line in path.read_text().splitlines()[1:]:
            entry = json.loads(line)
            name = folder / Path(unquote(urlparse(entry["path"]).path)).name
            found[name] = min(number, found.get(name, number))
    grouped: dict[int, list[Path]] = {}
    for name, number in found.items():
        grouped.setdefault(number, []).append(name)
    return sorted(grouped.items())


def rows(folder: Path, *columns: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Every row with its batch's number."""
    for number, paths in batches(folder):
        for path in paths:
            table = pq.ParquetFile(path).read(columns=list(columns))
            for row in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
                yield number, row


class Count:
    """How many rows there are; counts each file once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[Path, int] = {}

    def __call__(self) -> int:
        for _, paths in batches(self._folder):
            for path in paths:
                if path not in self._rows:
                    self._rows[path] = pq.ParquetFile(path).metadata.num_rows
        return sum(self._rows.values())


def committed(checkpoint: Path) -> int:
    """The number of batches that a query has committed to its checkpoint."""
    commits = checkpoint / "commits"
    if not commits.exists():
        return 0
    return 1 + max((int(path.name) for path in commits.iterdir() if path.name.isdigit()), default=-1)
