"""How a statement is run: on a connection of the pool's, or inside the caller's transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeAlias

from psycopg import AsyncConnection, AsyncCursor, errors, pq
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row

from pgmb._async.foreign import AsyncForeign
from pgmb._async.pool import AsyncBrokerPool
from pgmb._core import foreign, wire
from pgmb._core.batch import Copy, Parts
from pgmb._core.claiming import Known
from pgmb._core.observer import NULL_OBSERVER, Observer
from pgmb._core.statements import NO_TIMEOUT, SET_TIMEOUT, Statement
from pgmb.drivers import AsyncDriver
from pgmb.errors import StreamNotFound, server_error, translated
from pgmb.outbox import AsyncConnectionLike, aconnection_lost, ajoined

_UNDEFINED_TABLE: Final = "42P01"

Pool: TypeAlias = AsyncBrokerPool
AsyncJoined: TypeAlias = AsyncConnection[Any] | AsyncForeign
"""What runs statements in the caller's transaction."""


class _Cursor(AsyncCursor[wire.Row]):
    """Reads and writes by `wire.ADAPTERS`, whatever the connection's own settings are.

    The map is shared: registering adapters on each cursor would cost more than a small statement.
    """

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self.format = pq.Format.BINARY

    @property
    def adapters(self) -> AdaptersMap:
        return wire.ADAPTERS


class AsyncCalls:
    """Runs statements. The base of every part of the broker."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._remembered = Known(None)
        self.observer: Observer = NULL_OBSERVER
        """Wraps publishing, receiving and settling; set by instrumentation."""

    @property
    def _known(self) -> Known:
        """What the pool's connections reach. Nothing is remembered of a caller's connection."""
        if self._remembered.installation != self._pool.installation:
            self._remembered = Known(self._pool.installation)
        return self._remembered

    async def _rows(self, statement: Statement, conn: AsyncConnectionLike | None) -> list[wire.Row]:
        with translated():
            if conn is not None:
                async with _joined(conn) as given:
                    return await _fetch(given, statement)
            # Connections of the pool are autocommit: the statement is the whole transaction.
            own = await self._pool.getconn()
            try:
                return await _fetch(own, statement)
            finally:
                await self._pool.putconn(own)

    async def _timed_rows(self, statement: Statement, conn: AsyncConnectionLike | None) -> list[wire.Row]:
        """The same under a statement_timeout, without which nothing reads by an SQL condition."""
        with translated():
            if conn is not None:
                async with _joined(conn) as given:
                    if not _idle(given):
                        return await _fetch_timed(given, statement)
                    async with given.transaction():
                        return await _fetch_timed(given, statement)
            async with self._pool.connection() as own, own.transaction():
                return await _fetch_timed(own, statement)

    @asynccontextmanager
    async def _transaction(self, conn: AsyncConnectionLike | None) -> AsyncGenerator[AsyncConnection[Any]]:
        """A connection for statements that belong together: the caller's, or one in its own transaction."""
        with translated():
            if conn is not None:
                async with _joined(conn) as given:
                    if isinstance(given, AsyncForeign):
                        raise foreign.refusal()
                    if not _idle(given):
                        yield given
                        return
                    async with given.transaction():
                        yield given
                return
            async with self._pool.connection() as own, own.transaction():
                yield own

    async def _value(self, statement: Statement, conn: AsyncConnectionLike | None) -> Any:
        """The first column of the only row."""
        return (await self._rows(statement, conn))[0][0]

    async def _copy(self, copy: Copy, conn: AsyncConnectionLike | None) -> int:
        with translated():
            if conn is not None:
                async with _joined(conn) as given:
                    return await _write(given, copy)
            async with self._pool.connection() as own:
                return await _write(own, copy)

    async def _parts(self, parts: Parts, conn: AsyncConnectionLike | None) -> int:
        """All of them in one transaction; the sum of what they return."""
        with translated():
            if conn is not None:
                async with _joined(conn) as given:
                    if not _idle(given):
                        return await _run(given, parts)
                    async with given.transaction():
                        return await _run(given, parts)
            async with self._pool.connection() as own, own.transaction():
                return await _run(own, parts)


async def _run(connection: AsyncJoined, parts: Parts) -> int:
    total = 0
    for step in parts.steps:
        if isinstance(step, Copy):
            total += await _write(connection, step)
        else:
            total += (await _fetch(connection, step))[0][0]
    return total


@asynccontextmanager
async def _joined(conn: AsyncConnectionLike) -> AsyncGenerator[AsyncJoined]:
    connection = await ajoined(conn)
    if isinstance(connection, AsyncDriver):
        yield AsyncForeign(connection)
        return
    try:
        yield connection
    except errors.Error:
        # A library around it would not learn that it died: the statement was not its own.
        if connection.closed:
            await aconnection_lost(conn)
        raise


async def _fetch(connection: AsyncJoined, statement: Statement) -> list[wire.Row]:
    if isinstance(connection, AsyncForeign):
        return await connection.fetch(statement)
    cursor = _Cursor(connection)
    await cursor.execute(statement.text, statement.parameters)
    return await cursor.fetchall()


async def _fetch_timed(connection: AsyncJoined, statement: Statement) -> list[wire.Row]:
    limited = await _fetch(connection, SET_TIMEOUT)
    rows = await _fetch(connection, statement)
    if limited:
        # What else the transaction does may take longer.
        await _fetch(connection, NO_TIMEOUT)
    return rows


def _idle(connection: AsyncJoined) -> bool:
    """Whether each statement would be a transaction of its own; another library's connection looks itself."""
    if isinstance(connection, AsyncForeign):
        return True
    return connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE


async def _write(connection: AsyncJoined, copy: Copy) -> int:
    if isinstance(connection, AsyncForeign):
        total = 0
        async with connection.transaction():
            for statement in copy.statements:
                total += (await connection.fetch(statement))[0][0]
        return total
    cursor = _Cursor(connection)
    with writing_log(copy.stream):
        async with cursor.copy(copy.text) as writing:
            for data in copy.data:
                await writing.write(data)
    return cursor.rowcount


@contextmanager
def writing_log(stream: str) -> Generator[None]:
    """Without its table there is no such stream."""
    try:
        yield
    except Exception as error:
        said = server_error(error)
        if said is None or said.sqlstate != _UNDEFINED_TABLE:
            raise
        missing = StreamNotFound(f"stream '{stream}' does not exist")
        missing.hint = "Create it with create_stream(name)."
        raise missing from error
