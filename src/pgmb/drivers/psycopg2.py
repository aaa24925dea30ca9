"""psycopg2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg2.extensions import cursor

from pgmb.drivers import Driver


class Psycopg2(Driver):
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        # Cursors of the connection's own class may return dictionaries.
        with self._connection.cursor(cursor_factory=cursor) as used:
            used.execute(statement, tuple(parameters) or None)
            rows: list[Sequence[Any]] = used.fetchall() if used.description else []
        return rows
