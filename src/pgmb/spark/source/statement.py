"""The SQL that reads one part of a batch: a plain SELECT on the log, so that it can be a COPY. Pure.

What it gives is what `pgmb.between` gives of that stretch: the events that are visible in the snapshot of
`upto` and not in that of `after`. See the header of `pgmb_internal.main_part`.
"""

from __future__ import annotations

from typing import Final

from psycopg import sql

from pgmb.spark.source.offsets import Part
from pgmb.types import Position

# What a column of ours is made of. The others are the same for a whole batch.
_SOURCES: Final = {
    "id": ("seq", "published_at", "id"),
    "topic": ("topic",),
    "key": ("key",),
    "payload": ("payload",),
    "headers": ("headers",),
    "published_at": ("published_at",),
    "seq": ("seq",),
}


def columns_for(names: list[str]) -> list[str]:
    """The columns of the log that make these; one at least, so that rows can be counted."""
    needed = {source for name in names for source in _SOURCES.get(name, ())}
    order = ("seq", "id", "topic", "key", "payload", "headers", "published_at")
    return [column for column in order if column in needed] or ["seq"]


def select(stream: str, columns: list[str], after: Position, upto: Position, part: Part, asked: str) -> str:
    """Reads a part in the order of numbers. `asked` is added to the WHERE clause, and calls an event e."""
    given = ", ".join(f"e.{column}" for column in columns)
    log = sql.Identifier("pgmb", f"log_{stream}").as_string()
    if part.late:
        return _late(given, log, after, upto, part, asked)
    _, done_end, _ = after.snapshot.split(":")
    batch_begin, _, _ = upto.snapshot.split(":")
    return (
        f"select {given} from {log} e where e.seq > {part.lo} and e.seq <= {part.hi}"
        f" and (e.xid < '{batch_begin}'::xid8 or {_visible(upto)})"
        f" and (e.xid >= '{done_end}'::xid8 or not {_visible(after)}){asked} order by e.seq"
    )


def _late(given: str, log: str, after: Position, upto: Position, part: Part, asked: str) -> str:
    _, end, unfinished = after.snapshot.split(":")
    listed = [xid for xid in unfinished.split(",") if xid and int(xid) <= after.next]
    # seq + 0: by their xids, never by a walk over all numbers.
    bounds = f"e.seq + 0 > {part.lo} and e.seq + 0 <= {part.hi} and {_visible(upto)}"
    return (
        f"select {given} from {log} e where {bounds}"
        f" and (e.xid = any ('{{{','.join(listed)}}}'::xid8[])"
        f" or e.xid >= '{end}'::xid8 and e.xid <= '{after.next}'::xid8){asked} order by e.seq"
    )


def _visible(position: Position) -> str:
    return f"pg_visible_in_snapshot(e.xid, '{position.snapshot}'::pg_snapshot)"
