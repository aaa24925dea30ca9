"""asyncpg: connections, and those that a pool lends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pgmb.drivers import AsyncDriver


class Asyncpg(AsyncDriver):
    placeholder = "${}"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        rows: list[Sequence[Any]] = await self._connection.fetch(statement, *parameters)
        return rows
