"""SQL for HTTP handlers: queries, and changes with an audit entry in the same transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection
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


class Change:
    """A change in progress. Pass `conn` to the broker's methods."""

    def __init__(self, broker: AsyncBroker, conn: AsyncConnection[Any], actor: str) -> None:
        self.conn = conn
        self._broker = broker
        self._actor = actor

    async def record(self, action: str, subject: str | None = None, **detail: Any) -> None:
        """Add an audit entry. `action` is the name of the broker's method; None values are left out."""
        given = {name: value for name, value in detail.items() if value is not None}
        await self._broker.record(self._actor, action, subject, given, conn=self.conn)


@asynccontextmanager
async def changing(broker: AsyncBroker, actor: str) -> AsyncGenerator[Change]:
    """A transaction for a change and its audit entry: both commit, or neither does."""
    with translated():
        async with broker.own_connection() as conn, conn.transaction():
            yield Change(broker, conn, actor)


def audited(given: msgspec.Struct, *hidden: str) -> Mapping[str, Any]:
    """A request's fields for the audit, without the `hidden` (secret) ones."""
    return {name: value for name, value in msgspec.structs.asdict(given).items() if name not in hidden}
