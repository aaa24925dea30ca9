"""The tasks of Spark: rows out of a part of the lake."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any, Final

import msgspec
import pyarrow
import pyarrow.compute

from pgmb._core.lake import topics
from pgmb.lake.projection.columns import (
    Column,
    Decoder,
    MisfitError,
    Seen,
    layout,
    slices,
)
from pgmb.lake.projection.table import rows_of
from pgmb.lake.storage import Storage
from pgmb.lake.task import Bounds, DamagedError, DateWriter, WrittenFile, by_day, in_order

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_ERASED: Final = '{"pgmb-erased":'


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
