"""The broker: all that a client can ask for, over one pool of connections."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Self, cast

from psycopg import AsyncConnection, errors
from psycopg.conninfo import conninfo_to_dict

from pgmb import schema
from pgmb._async.endpoints import AsyncEndpoints
from pgmb._async.group import AsyncGrouping
from pgmb._async.keys import AsyncKeys
from pgmb._async.pool import AsyncBrokerPool
from pgmb._async.positions import AsyncPositions
from pgmb._async.publisher import AsyncPublisher
from pgmb._async.publishing import AsyncPublishing
from pgmb._async.schedules import AsyncSchedules
from pgmb._async.status import AsyncStatus
from pgmb._async.streams import AsyncStreams
from pgmb._async.tail import AsyncTailing
from pgmb._core import batch, connecting, durations
from pgmb._core.pending import Pending
from pgmb.errors import translated
from pgmb.types import Duration


class AsyncBroker(
    AsyncPublishing,
    AsyncGrouping,
    AsyncTailing,
    AsyncStreams,
    AsyncPositions,
    AsyncStatus,
    AsyncSchedules,
    AsyncEndpoints,
    AsyncKeys,
):
    """A broker in a PostgreSQL database. Made by `aconnect`; closes its connections at the end of `with`.

    Methods are named as the functions in the schema pgmb. Each runs in a transaction of its own, or, with
    `conn=`, inside the caller's: both commit or neither does.
    """

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """A connection of the pool's for statements of your own and for `conn=`.

        In autocommit mode and with rows as tuples, unless the options of `aconnect` say otherwise. What you
        change on it, other than by SET, is undone when the block ends.
        """
        return self._pool.lent()

    def own_connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """A connection as pgmb's own statements need it, whatever the user chose. For pgmb's parts."""
        return self._pool.connection()

    @property
    def server(self) -> tuple[str | None, int | None]:
        """Host and port, as far as the connection string names them."""
        given = self._given()
        host, port = given.get("host") or given.get("hostaddr"), str(given.get("port") or "")
        return (str(host) if host else None), (int(port) if port.isdigit() else None)

    def _given(self) -> dict[str, Any]:
        text = self._pool.conninfo if isinstance(self._pool.conninfo, str) else ""
        return {**conninfo_to_dict(text), **cast("dict[str, Any]", self._pool.kwargs)}

    @property
    def pool_stats(self) -> dict[str, int]:
        """The pool's counters, as `psycopg_pool` names them."""
        return self._pool.get_stats()

    @property
    def inherited(self) -> bool:
        """Whether it was made before a fork, in another process, and serves that process only."""
        return self._pool.home.inherited

    def backends(self) -> list[int]:
        """The server processes of the pool's connections. Behind a pooler they are not known: none."""
        return self._pool.backends()

    def break_off(self, caller: object, used_for: float = 0.0) -> float:
        """Close the connections that a task (or, synchronous, a thread) uses: its statement fails at once.

        For a call that has waited for too long on a server that does not answer. Does nothing until the
        caller has used one of them for `used_for` seconds. Returns the longest such time, zero if it uses
        none.
        """
        return self._pool.break_off(caller, used_for)

    def publisher(
        self,
        flush_every: Duration = 0.05,
        max_batch: int = 500,
        max_pending: int = 10_000,
        *,
        max_pending_bytes: int = 256 << 20,
        exactly_once: bool = True,
        dedup_for: Duration = batch.ONE_DAY,
    ) -> AsyncPublisher:
        """A background publisher: `enqueue` returns at once, events are published in batches.

        A batch goes when it has `max_batch` events or its first one has waited for `flush_every`. It has at
        most 32 MiB. At most `max_pending` events are held, and no more are taken while these have
        `max_pending_bytes` of payloads and headers. A connection lost while a batch commits repeats
        nothing, unless `exactly_once` is off; `dedup_for` is how long the events' own keys are remembered.
        """
        held = Pending(flush_every, max_batch, max_pending, max_pending_bytes)
        return AsyncPublisher(self, self._pool, held, exactly_once, dedup_for)

    def abandon(self) -> None:
        """Close the connections of a broker whose event loop was closed before it was."""
        self._pool.abandon()

    def __repr__(self) -> str:
        database, (host, port) = self._given().get("dbname"), self.server
        place = "the default database" if database is None else repr(database)
        server = "" if host is None else f" on {host}" if port is None else f" on {host}:{port}"
        open_ = f"{self.pool_stats.get('pool_size', 0)} of {self._pool.max_size} connections"
        return f"<{type(self).__name__} of {place}{server}, {'closed' if self._pool.closed else open_}>"

    async def close(self) -> None:
        """Close all connections. May be called again. After a fork it does nothing: they are the parent's."""
        if self._pool.home.inherited:
            return
        if self._pool.home.ended:
            self.abandon()
            return
        self._pool.refuse_elsewhere()
        for group in list(self._groups.values()):
            await group.close()
        if self._listener is not None:
            await self._listener.close()
        await self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def aconnect(
    dsn: str = "",
    *,
    min_size: int = 1,
    max_size: int = 10,
    max_wait: Duration = 30.0,
    pooler: bool | None = None,
    **connection: Any,
) -> AsyncBroker:
    """Connect to the database and check that its schema is of the version that this package works with.

    Between `min_size` and `max_size` connections are kept; a call waits for a free one at most `max_wait`
    seconds. Statements are prepared on the server, except behind a pooler such as PgBouncer, which may give
    each transaction another server connection: that is noticed by itself, `pooler` overrules it. Further
    keywords go to psycopg's `connect`.

    Connections have TCP keepalives, timeouts and an application_name, unless `dsn` or the keywords set them.
    pgmb's own statements run in autocommit mode, in READ COMMITTED and in UTF-8, with rows as tuples: the
    keywords `autocommit`, `row_factory`, `cursor_factory` and `context`, and the isolation level of `dsn`,
    apply to `connection()` alone.
    """
    # One connection first: the pool would try a wrong address for as long as `max_wait`, and hide why.
    async with await connecting.aconnect(dsn, **connection) as first:
        found, server_process = await _look(first)
        schema.check(found)
        # A pooler answers with a process id of its own making.
        behind_pooler = server_process != first.info.backend_pid if pooler is None else pooler
    options: dict[str, Any] = {"prepare_threshold": None} if behind_pooler else {}
    pool = AsyncBrokerPool(
        dsn,
        {**options, **connection},
        min_size=min_size,
        max_size=max_size,
        max_wait=durations.seconds(max_wait),
        pooler=behind_pooler,
    )
    await pool.open()
    return AsyncBroker(pool)


async def _look(connection: AsyncConnection[Any]) -> tuple[int | None, int | None]:
    try:
        with translated():
            cursor = await connection.execute(schema.LOOK)
    except errors.UndefinedTable:
        return None, None
    version, process = await cursor.fetchone() or (None, None)
    return version, process
