"""What is declared of projections: names, topics and columns, in the database and in files."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
import psycopg
from psycopg.rows import class_row, dict_row

from pgmb._core.connecting import connect
from pgmb.errors import InvalidArgument, translated
from pgmb.lake.projection.columns import (
    Column,
    Drift,
    GivenColumn,
    SeenField,
    checked,
    drift,
    parse_column,
)
from pgmb.spark.source.offsets import SEGMENT_BITS

_DROP: Final = "select pgmb.drop_projection(%s)"
_FIND: Final = (
    "select stream, url, source, lake_url, lake_source, patterns, columns, bad, generation, upto"
    " from pgmb.projection_of(%s)"
)
_DESCRIBE: Final = (
    "select name, stream, url, patterns, columns, bad, generation, segment, upto, lake_version,"
    " table_version, rows, rescued, dropped, moved_at, created_at from pgmb.describe_projections()"
)
_FIELDS: Final = "select field, kind, first_seq, last_seq, first_at, last_at from pgmb.describe_fields(%s)"


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A projection as it is declared.

    topics   patterns of topics
    bad      what becomes of payloads that do not fit: rescue, drop or fail
    url      of its table; None: beside the table of the stream
    """

    name: str
    stream: str = "main"
    topics: list[str]
    columns: list[Column]
    bad: str = "rescue"
    url: str | None = None


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """A projection, and where it stood when it was last recorded: the last segment, of those up to `upto`."""

    name: str
    stream: str
    url: str
    patterns: list[str]
    columns: list[Column]
    bad: str
    generation: int
    segment: int | None
    upto: int | None
    lake_version: int | None
    table_version: int | None
    rows: int
    rescued: int
    dropped: int
    moved_at: datetime | None
    created_at: datetime
    drift: list[Drift] = []


class _GivenProjection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topics: str | list[str]
    columns: dict[str, str | GivenColumn]
    stream: str = "main"
    bad: str = "rescue"
    url: str | None = None


class _GivenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    projections: dict[str, _GivenProjection]


def load(text: str) -> list[Declaration]:
    """The declarations of a file in YAML."""
    try:
        given = msgspec.yaml.decode(text, type=_GivenFile)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"the file does not declare projections: {error}") from None
    return [
        Declaration(
            name=name,
            stream=one.stream,
            topics=[one.topics] if isinstance(one.topics, str) else one.topics,
            columns=checked([parse_column(column, kind) for column, kind in one.columns.items()]),
            bad=one.bad,
            url=one.url,
        )
        for name, one in given.projections.items()
    ]


def drop(dsn: str, name: str) -> str | None:
    """Forget a projection. Returns the URL of its table, which stays; None: there is none of that name."""
    with connect(dsn, "pgmb lake") as database, translated():
        row = database.execute(_DROP, [name]).fetchone()
    return None if row is None else row[0]


def projections(dsn: str) -> list[Described]:
    """All projections, with the drift of their payloads."""
    with connect(dsn, "pgmb lake") as database, translated():
        with database.cursor(row_factory=dict_row) as cursor:
            found = [msgspec.convert(row, Described) for row in cursor.execute(_DESCRIBE)]
        return [
            msgspec.structs.replace(one, drift=_drift(database, one)) if one.upto is not None else one
            for one in found
        ]


def _drift(database: psycopg.Connection[Any], one: Described) -> list[Drift]:
    with database.cursor(row_factory=class_row(SeenField)) as cursor:
        return drift(one.columns, cursor.execute(_FIELDS, [one.name]).fetchall(), SEGMENT_BITS)


def names_of(database: psycopg.Connection[Any], stream: str) -> list[str]:
    """The projections of a stream."""
    rows = database.execute("select name from pgmb.describe_projections() where stream = %s", [stream])
    return [name for (name,) in rows]


class Projection(msgspec.Struct, frozen=True):
    """What the database knows of a projection."""

    stream: str
    url: str
    source: str
    lake_url: str | None
    lake_source: str
    patterns: list[str]
    columns: list[Column]
    bad: str
    generation: int
    upto: int | None

    @property
    def end(self) -> int:
        """The highest number that an event of its segments could have."""
        return -1 if self.upto is None else end_of(self.upto)


def find(dsn: str, name: str) -> Projection:
    """A projection by its name, for roles that may read its stream. Raises ProjectionNotFound."""
    with connect(dsn, "pgmb lake") as database, translated():
        return found_in(database, name)


def found_in(database: psycopg.Connection[Any], name: str) -> Projection:
    with database.cursor(row_factory=dict_row) as cursor:
        return msgspec.convert(cursor.execute(_FIND, [name]).fetchone(), Projection)


def end_of(segment: int) -> int:
    return ((segment + 1) << SEGMENT_BITS) - 1
