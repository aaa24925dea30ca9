"""The columns of an event, and the SQL that reads a range of events. Pure.

The statement is a plain SELECT on the log, so that COPY can run it. It returns what `pgmb.between` returns
for that range: the events visible in the snapshot of `upto` and not in that of `after`. See the header of
`pgmb_internal.main_part`. Only filters that mean the same in Spark and PostgreSQL are pushed down: text is
compared for equality, since its order differs.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from pgmb.spark.source.offsets import SeqRange
from pgmb.types import Position

# The columns of the log, and two that are constant within a batch: the stream, and the position of its end.
SCHEMA: Final = (
    "id STRING, stream STRING, topic STRING, key STRING, payload STRING, headers STRING, "
    "published_at TIMESTAMP, seq BIGINT, position STRING"
)

_ARROW_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("id", pa.string()),
    pa.field("stream", pa.string()),
    pa.field("topic", pa.string()),
    pa.field("key", pa.string()),
    pa.field("payload", pa.string()),
    pa.field("headers", pa.string()),
    pa.field("published_at", pa.timestamp("us", tz="UTC")),
    pa.field("seq", pa.int64()),
    pa.field("position", pa.string()),
]
ARROW_SCHEMA: Final = pa.schema(_ARROW_FIELDS)


def arrow_schema(names: list[str]) -> pa.Schema:
    """The Arrow schema of these columns, in this order."""
    unknown = [name for name in names if name not in ARROW_SCHEMA.names]
    if unknown:
        raise ValueError(
            f"an event has no column {', '.join(unknown)}: choose among {', '.join(ARROW_SCHEMA.names)}, "
            "and decode payloads afterwards, for example with pgmb.spark.decode"
        )
    fields: list[Any] = [_ARROW_FIELDS[ARROW_SCHEMA.names.index(name)] for name in names]
    return pa.schema(fields)


_TEXT_COLUMNS: Final = ("topic", "key")
_ORDERED_COLUMNS: Final = {"published_at": datetime, "seq": int}
_OPERATORS: Final[dict[type[Filter], str]] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition(pushed: Filter) -> str | None:
    """A pushed-down filter as a condition on an event `e`; None if Spark must evaluate it."""
    match pushed:
        case Not(child=inner):
            inside = condition(inner)
            return None if inside is None else f"not ({inside})"
        case IsNull(attribute=(name,)) if name in (*_TEXT_COLUMNS, *_ORDERED_COLUMNS):
            return f"e.{name} is null"
        case IsNotNull(attribute=(name,)) if name in (*_TEXT_COLUMNS, *_ORDERED_COLUMNS):
            return f"e.{name} is not null"
        case StringStartsWith(attribute=(name,), value=value) if name in _TEXT_COLUMNS and _fits(name, value):
            return f"starts_with(e.{name}, {_literal(value)})"
        case EqualTo(attribute=(name,), value=value) if _fits(name, value):
            return f"e.{name} = {_literal(value)}"
        case In(attribute=(name,), value=values) if values and all(_fits(name, value) for value in values):
            return f"e.{name} in ({', '.join(_literal(value) for value in values)})"
        case _ if type(pushed) in _OPERATORS:
            name, value = pushed.attribute[0], pushed.value  # type: ignore[attr-defined]
            if len(pushed.attribute) == 1 and name in _ORDERED_COLUMNS and _fits(name, value):  # type: ignore[attr-defined]
                return f"e.{name} {_OPERATORS[type(pushed)]} {_literal(value)}"
            return None
        case _:
            return None


def _fits(name: str, value: Any) -> bool:
    if name in _TEXT_COLUMNS:
        return isinstance(value, str) and "\0" not in value
    if name == "seq":
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return name in _ORDERED_COLUMNS and isinstance(value, datetime) and value.tzinfo is not None


def _literal(value: Any) -> str:
    return sql.Literal(value).as_string()


# The columns of the log that a column is made of. The others are constant within a batch.
_LOG_COLUMNS: Final = {
    "id": ("seq", "published_at", "id"),
    "topic": ("topic",),
    "key": ("key",),
    "payload": ("payload",),
    "headers": ("headers",),
    "published_at": ("published_at",),
    "seq": ("seq",),
}


def columns_for(names: list[str]) -> list[str]:
    """The columns of the log that these are made of; at least one, so that rows can be counted."""
    needed = {source for name in names for source in _LOG_COLUMNS.get(name, ())}
    order = ("seq", "id", "topic", "key", "payload", "headers", "published_at")
    return [column for column in order if column in needed] or ["seq"]


def select(
    stream: str, columns: list[str], after: Position, upto: Position, seqs: SeqRange, conditions: str
) -> str:
    """The statement that reads a range by seq. `conditions` on the event `e` extend the WHERE clause."""
    given = ", ".join(f"e.{column}" for column in columns)
    log = sql.Identifier("pgmb", f"log_{stream}").as_string()
    if seqs.late:
        return _late(given, log, after, upto, seqs, conditions)
    _, after_end, _ = after.snapshot.split(":")
    upto_begin, _, _ = upto.snapshot.split(":")
    return (
        f"select {given} from {log} e where e.seq > {seqs.lo} and e.seq <= {seqs.hi}"
        f" and (e.xid < '{upto_begin}'::xid8 or {_visible(upto)})"
        f" and (e.xid >= '{after_end}'::xid8 or not {_visible(after)}){conditions} order by e.seq"
    )


def _late(given: str, log: str, after: Position, upto: Position, seqs: SeqRange, conditions: str) -> str:
    _, end, unfinished = after.snapshot.split(":")
    listed = [xid for xid in unfinished.split(",") if xid and int(xid) <= after.next]
    # seq + 0 keeps PostgreSQL from using the index on seq: late events are found by xid.
    bounds = f"e.seq + 0 > {seqs.lo} and e.seq + 0 <= {seqs.hi} and {_visible(upto)}"
    return (
        f"select {given} from {log} e where {bounds}"
        f" and (e.xid = any ('{{{','.join(listed)}}}'::xid8[])"
        f" or e.xid >= '{end}'::xid8 and e.xid <= '{after.next}'::xid8){conditions} order by e.seq"
    )


def _visible(position: Position) -> str:
    return f"pg_visible_in_snapshot(e.xid, '{position.snapshot}'::pg_snapshot)"
