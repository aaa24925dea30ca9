"""SQLAlchemy's connections, over whichever driver the engine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pgmb.drivers import AsyncDriver, Driver
from pgmb.errors import InvalidArgument

_PLACEHOLDERS: Final = {
    "format": "%s",
    "pyformat": "%s",
    "numeric_dollar": "${}",
    "numeric": ":{}",
    "qmark": "?",
}
# Cursors of the server can run no statement that writes.
_OPTIONS: Final = {"stream_results": False}


def _placeholder(connection: Any) -> str:
    style = connection.dialect.paramstyle
    if style not in _PLACEHOLDERS:
        raise InvalidArgument(
            f"conn= is over a driver whose parameters pgmb cannot write: paramstyle {style!r}"
        )
    return _PLACEHOLDERS[style]


class Sqlalchemy(Driver):
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.placeholder = _placeholder(connection)

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        result = self._connection.exec_driver_sql(statement, tuple(parameters), execution_options=_OPTIONS)
        rows: Sequence[Sequence[Any]] = result.fetchall() if result.returns_rows else []
        return rows


class AsyncSqlalchemy(AsyncDriver):
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.placeholder = _placeholder(connection)

    async def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        result = await self._connection.exec_driver_sql(
            statement, tuple(parameters), execution_options=_OPTIONS
        )
        rows: Sequence[Sequence[Any]] = result.fetchall() if result.returns_rows else []
        return rows
