"""Django's connections, over psycopg2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgmb.drivers import Driver


class Django(Driver):
    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        with self._wrapper.cursor() as cursor:
            cursor.execute(statement, tuple(parameters) or None)
            rows: Sequence[Sequence[Any]] = cursor.fetchall() if cursor.description else []
        return rows
