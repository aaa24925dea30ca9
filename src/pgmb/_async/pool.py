"""The pool of connections: it hands out none that is known to be dead, and reconnects within seconds."""

from __future__ import annotations

import select
import time
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast
from uuid import UUID
from weakref import WeakSet

import psycopg
import psycopg_pool
from psycopg import AsyncConnection, AsyncCursor, IsolationLevel, errors
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool

from pgmb._core.concurrency import AsyncEndingPool, AsyncHome, acaller, acancellations, hang_up
from pgmb._core.connecting import conninfo, formats, required
from pgmb.errors import BrokerClosed, NoConnection, PgmbError

# The pool waits twice as long after each failed attempt to connect, until this many seconds after the first.
# Then it gives up, and `_connect_again` starts over. So attempts are at most about a second apart.
_RECONNECT_SECONDS = 2.0
_DRAIN_EVERY_SECONDS = 1.0
_READ_COMMITTED: Final = "read committed"
# Functions that decide by the rows of other sessions need READ COMMITTED. A session behind a pooler is shared
# with other programs and keeps its level. The subquery reads the level before it is set.
_BEGIN_SESSION: Final = f"""
    select i.identity, s.level,
      case when s.level <> '{_READ_COMMITTED}' and pg_backend_pid() = %s::integer
        then set_config('default_transaction_isolation', '{_READ_COMMITTED}', false) end
    from pgmb.installation i
      cross join (select current_setting('default_transaction_isolation') as level offset 0) s
"""


class AsyncPoolConnection(AsyncConnection[Any]):
    """A connection that runs pgmb's statements, and those of a user who borrows it, each in their own way."""

    level: IsolationLevel | None = None
    """The isolation level that the connection string, the role or the database asks for."""
    _lent: AdaptersMap | None = None

    @property
    def adapters(self) -> AdaptersMap:
        return super().adapters if self._lent is None else self._lent

    async def lend(self, chosen: Mapping[str, Any]) -> None:
        """Behave as psycopg would with the user's options."""
        self._lent = AdaptersMap(chosen["context"].adapters if chosen.get("context") else psycopg.adapters)
        self.row_factory = chosen.get("row_factory", tuple_row)
        self.cursor_factory = chosen.get("cursor_factory", AsyncCursor)
        await self.set_isolation_level(self.level)
        await self.set_autocommit(chosen.get("autocommit", True))

    async def take_back(self) -> None:
        """Undo that, and what the user changed."""
        self._lent = None
        self.row_factory, self.cursor_factory = tuple_row, AsyncCursor
        await self.set_isolation_level(None)
        await self.set_read_only(None)
        await self.set_deferrable(None)
        await self.set_autocommit(True)
        if wrong := formats(self):
            await self.execute(wrong)


class AsyncBrokerPool(AsyncEndingPool):
    def __init__(
        self,
        dsn: str,
        options: dict[str, Any],
        *,
        min_size: int = 1,
        max_size: int = 10,
        max_wait: float = 30.0,
        pooler: bool = False,
    ) -> None:
        self.installation: UUID | None = None
        """The identity of the installation that the newest connection reached."""
        self._callers: dict[AsyncConnection[Any], tuple[object, float]] = {}
        """Who uses a connection, and since when."""
        self._chosen = options
        self.home = AsyncHome()
        self._pooler = pooler
        self._made: WeakSet[AsyncConnection[Any]] = WeakSet()
        self._drained = float("-inf")
        super().__init__(
            conninfo(dsn),
            connection_class=AsyncPoolConnection,
            kwargs=required(options),
            min_size=min_size,
            max_size=max_size,
            timeout=max_wait,
            reconnect_timeout=_RECONNECT_SECONDS,
            reconnect_failed=_connect_again,
            configure=self._begin_session,
            open=False,
            name="pgmb",
        )

    async def getconn(self, timeout: float | None = None) -> AsyncConnection[Any]:  # noqa: ASYNC109, RUF100
        """A connection that was alive a moment ago, as far as can be known without asking the server."""
        self.refuse_elsewhere()
        before = acancellations()
        while True:
            try:
                found = await super().getconn(timeout)
            except psycopg_pool.PoolClosed as error:
                raise BrokerClosed("the broker is closed") from error
            except psycopg_pool.PoolTimeout as error:
                within = self.timeout if timeout is None else timeout
                empty = NoConnection(f"no connection within {within:g} s: {error}")
                empty.advise("Raise max_size of connect(), or keep transactions shorter.")
                raise empty from error
            if acancellations() > before:
                # In Python 3.11 a wait that ends as it is cancelled forgets the cancellation.
                await self.putconn(found)
                raise CancelledError
            self._callers[found] = acaller(), time.monotonic()
            if not _has_input(found) or await _is_alive(found):
                return found
            # The server was restarted, most likely, and the other connections are dead too.
            await self.putconn(found)

    async def _get_ready_connection(self, timeout: float | None) -> AsyncConnection[Any] | None:  # noqa: ASYNC109, RUF100
        # Last in, first out: the server process used last has its plans and caches ready.
        self._pool.rotate()
        return await super()._get_ready_connection(timeout)

    async def putconn(self, conn: AsyncConnection[Any]) -> None:
        """Take a connection back. If it broke, the idle ones are replaced too: each would fail a call."""
        self._callers.pop(conn, None)
        if conn.closed:
            await self._replace(conn)
        else:
            await super().putconn(conn)

    def refuse_elsewhere(self) -> None:
        """Raise PgmbError in another process, or another event loop, than that of the connections."""
        if self.home.inherited:
            error = PgmbError("the broker was made before a fork, in another process")
            error.advise("Connect after the fork: its connections are the other process's.")
            raise error
        if self.home.elsewhere:
            state = "that is closed" if self.home.ended else "than this one"
            error = PgmbError(f"the broker was made in another event loop {state}")
            error.advise("Connect in each event loop, or use an App, which does so by itself.")
            raise error

    def abandon(self) -> None:
        """Close the connections without a word, where their event loop is closed and can do nothing more."""
        for conn in list(self._made):
            if not self.home.inherited:
                conn.pgconn.finish()

    def backends(self) -> list[int]:
        """The server processes of the open connections; none behind a pooler, which makes up their ids."""
        if self._pooler:
            return []
        return sorted(conn.info.backend_pid for conn in list(self._made) if not conn.closed)

    @asynccontextmanager
    async def lent(self) -> AsyncGenerator[AsyncConnection[Any]]:
        """A connection for the user's own statements, as the options of `aconnect` say."""
        conn = cast("AsyncPoolConnection", await self.getconn())
        try:
            await conn.lend(self._chosen)
            async with conn:
                yield conn
        finally:
            await self._take_back(conn)

    async def _take_back(self, conn: AsyncPoolConnection) -> None:
        try:
            if not conn.closed:
                await conn.take_back()
        except psycopg.Error:
            # It is in a state that this module cannot end, such as a pipeline: replace it.
            await conn.close()
        finally:
            await self.putconn(conn)

    async def _begin_session(self, conn: AsyncConnection[Any]) -> None:
        if wrong := formats(conn, pooled=self._pooler):
            await conn.execute(wrong)
        # Without the schema, or the right to it, each call tells what is wrong.
        with suppress(errors.UndefinedTable, errors.InsufficientPrivilege):
            cursor = await conn.execute(_BEGIN_SESSION, [conn.info.backend_pid], prepare=False)
            for self.installation, level, _ in await cursor.fetchall():
                if level != _READ_COMMITTED:
                    cast("AsyncPoolConnection", conn).level = IsolationLevel[level.replace(" ", "_").upper()]
        self._made.add(conn)

    def break_off(self, caller: object, used_for: float = 0.0) -> float:
        """Close the sockets of the connections that a task or thread uses, so that its statement fails now.

        For a caller that has waited for too long: cancelling it would wait for the server to answer. Does
        nothing until the caller has used one of them for `used_for` seconds. Returns the longest such time,
        zero if it uses none.
        """
        used = [(conn, since) for conn, (user, since) in list(self._callers.items()) if user is caller]
        longest = max([time.monotonic() - since for _, since in used], default=0.0)
        if longest >= used_for:
            for conn, _ in used:
                hang_up(conn)
        return longest

    async def _replace(self, conn: AsyncConnection[Any]) -> None:
        await super().putconn(conn)
        now = time.monotonic()
        if not self.closed and now - self._drained >= _DRAIN_EVERY_SECONDS:
            self._drained = now
            await self.drain()


async def _connect_again(pool: AsyncConnectionPool[Any]) -> None:
    # A call that waits since before the outage would not be noticed: only new calls open connections.
    if not pool.closed and pool.get_stats().get("requests_waiting"):
        await pool.check()


def _has_input(conn: AsyncConnection[Any]) -> bool:
    """Whether the server sent something, or closed the connection, while it was idle."""
    try:
        descriptor = conn.fileno()
    except psycopg.Error:
        return True
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))
    return bool(select.select([descriptor], [], [], 0)[0])


async def _is_alive(conn: AsyncConnection[Any]) -> bool:
    # A notice or a changed parameter is input too.
    try:
        await conn.execute("")
    except psycopg.Error:
        await conn.close()
    return not conn.closed
