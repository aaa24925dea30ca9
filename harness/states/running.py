"""Statements of helpers, run by connections and by stepped sessions alike."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.rows import tuple_row

Connection: TypeAlias = psycopg.Connection[Any]


class Stepped(Protocol):
    """A session that runs its statements in a thread of its own: harness.sessions.Session and the like."""

    def run(self, statement: str, parameters: Any = ..., /) -> list[tuple[Any, ...]]: ...


Db: TypeAlias = Connection | Stepped


def rows(db: Db, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    """Run a statement and return its rows, none for one without a result."""
    if not isinstance(db, psycopg.Connection):
        return db.run(statement, parameters)
    with db.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description is not None else []


def value(db: Db, statement: str, parameters: Any = None) -> Any:
    """The first column of the only row."""
    (row,) = rows(db, statement, parameters)
    return row[0]
