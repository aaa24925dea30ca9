"""The pool of connections: it hands out none that is known to be dead, and reconnects within seconds."""

from __future__ import annotations

import select
import time
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from pgmb._core.concurrency import AsyncEndingPool, acaller, hang_up
from pgmb._core.connecting import conninfo

# The pool waits twice as long after each failed attempt to connect, until this many seconds after the first.
# Then it gives up, and `_connect_again` starts over. So attempts are at most about a second apart.
_RECONNECT_SECONDS = 2.0
_DRAIN_EVERY_SECONDS = 1.0


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
        self._callers: dict[AsyncConnection[Any], tuple[object, float]] = {}
        """Who uses a connection, and since when."""
        self._pooler = pooler
        self._made: WeakSet[AsyncConnection[Any]] = WeakSet()
        self._drained = float("-inf")
        super().__init__(
            conninfo(dsn),
            kwargs=options,
            min_size=min_size,
            max_size=max_size,
            timeout=max_wait,
            reconnect_timeout=_RECONNECT_SECONDS,
            reconnect_failed=_connect_again,
            configure=self._note_made,
            open=False,
            name="pgmb",
        )

    async def getconn(self, timeout: float | None = None) -> AsyncConnection[Any]:  # noqa: ASYNC109, RUF100
        """A connection that was alive a moment ago, as far as can be known without asking the server."""
        while True:
            found = await super().getconn(timeout)
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

    def backends(self) -> list[int]:
        """The server processes of the open connections; none behind a pooler, which makes up their ids."""
        if self._pooler:
            return []
        return sorted(conn.info.backend_pid for conn in list(self._made) if not conn.closed)

    async def _note_made(self, conn: AsyncConnection[Any]) -> None:
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
