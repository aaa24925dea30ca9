"""Asking the database what the broker has no method for."""

from __future__ import annotations

from typing import Any

from psycopg.rows import tuple_row

from pgmb._async.broker import AsyncBroker
from pgmb.errors import translated


async def rows(broker: AsyncBroker, statement: Any, parameters: Any = ()) -> list[Any]:
    """What one statement finds, as tuples, on a connection of the pool's."""
    with translated():
        async with broker.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()
