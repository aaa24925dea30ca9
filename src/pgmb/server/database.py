"""SQL for HTTP handlers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from psycopg.rows import tuple_row

from pgmb._async.broker import AsyncBroker
from pgmb._core.concurrency import AsyncDeadline
from pgmb.errors import translated

ANSWER_SECONDS: Final = 60.0
"""How long a request waits for the database. Without a limit it would wait forever for a connection that a
proxy keeps open although its server is gone, and keep its place in the pool."""
_SET_TIMEOUT: Final = "select set_config('statement_timeout', %s, true)"


def answering(broker: AsyncBroker) -> AbstractContextManager[None]:
    """Close the connections that this task uses if the database does not answer in time."""
    return AsyncDeadline("request", broker.break_off, ANSWER_SECONDS).enforced()


async def rows(
    broker: AsyncBroker, statement: Any, parameters: Any = (), *, within: float | None = None
) -> list[Any]:
    """Run one statement on a pooled connection, and return its rows as tuples.

    within: statement timeout in seconds (QueryCanceled); 0 disables it.
    """
    with translated(), answering(broker):
        if within is not None:
            async with broker.own_connection() as connection, connection.transaction():
                await connection.execute(_SET_TIMEOUT, (f"{round(within * 1000)}ms",))
                cursor = connection.cursor(row_factory=tuple_row)
                await cursor.execute(statement, parameters)
                return await cursor.fetchall()
        async with broker.own_connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)
            await cursor.execute(statement, parameters)
            return await cursor.fetchall()
