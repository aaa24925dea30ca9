"""pg8000, by its DB-API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pg8000 import dbapi

from pgmb.drivers import Driver


class Pg8000(Driver):
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def placeholder(self) -> str:  # type: ignore[override]
        """A setting of the module, which programs change."""
        return {"qmark": "?", "numeric": ":{}"}.get(dbapi.paramstyle, "%s")

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        cursor = self._connection.cursor()
        try:
            cursor.execute(statement, tuple(parameters))
            rows: Sequence[Sequence[Any]] = cursor.fetchall() if cursor.description else []
        finally:
            cursor.close()
        return rows
