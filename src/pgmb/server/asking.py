"""Asking the database what the broker has no method for."""

from __future__ import annotations

from typing import Any, Final

from psycopg.rows import tuple_row

from pgmb._async.broker import AsyncBroker
from pgmb.errors import translated

_LIMIT: Final = "select set_config('statement_timeout', %s, true)"


async def rows(
    broker: AsyncBroker, statement: Any, parameters: Any = (), *, within: float | None = None
) -> list[Any]:
    """What one statement finds, as tuples, on a connection of the pool's.

    within: seconds after which the server cancels it (QueryCanceled); 0 lifts any limit.
    """
    with translated():
        if within is not None:
            async with broker.connection() as connection, connection.transaction():
                await connection.execute(_LIMIT, (f"{round(within * 1000)}ms",))
                cursor = connection.cursor(row_factory=tuple_row)
                await cursor.execute(statement, parameters)
                return await cursor.fetchall()
        async with broker.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()
