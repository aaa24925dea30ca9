"""Status: what stands where."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from pgmb._async.calls import AsyncCalls
from pgmb._core import statements, wire
from pgmb._core.statements import call
from pgmb.errors import TimeoutRequired
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import (
    Disagreement,
    EventFate,
    NextEvents,
    QueueStatus,
    ReaderStatus,
    SinkStatus,
    StreamStatus,
    WorkerStatus,
)


class AsyncStatus(AsyncCalls):
    async def queue_status(self, *, conn: AsyncConnectionLike | None = None) -> list[QueueStatus]:
        """Every queue that this role may consume. Costs the same with a backlog of any size."""
        return [QueueStatus.of(row) for row in await self._rows(statements.QUEUE_STATUS, conn)]

    async def stream_status(self, *, conn: AsyncConnectionLike | None = None) -> list[StreamStatus]:
        """Every stream, at a cost that no backlog changes."""
        return [StreamStatus(*row) for row in await self._rows(statements.STREAM_STATUS, conn)]

    async def reader_status(self, *, conn: AsyncConnectionLike | None = None) -> list[ReaderStatus]:
        """Every durable reader (`confirm`) of the streams that this role may read, likewise."""
        return [ReaderStatus.of(row) for row in await self._rows(statements.READER_STATUS, conn)]

    async def sink_status(self, *, conn: AsyncConnectionLike | None = None) -> list[SinkStatus]:
        """Every application that publishes by versions, as Spark does: the last one, and what is staged."""
        return [SinkStatus.of(row) for row in await self._rows(statements.SINK_STATUS, conn)]

    async def queue_depth(self, queue: str, *, conn: AsyncConnectionLike | None = None) -> int | None:
        """Exactly how many events wait in a queue: reads every one of them. None if its filter raises."""
        depth = await self._value(call("queue_depth", queue=queue), conn)
        return None if depth is None else int(depth)

    async def next_events(
        self,
        queue: str,
        max: int | None = None,
        look: int | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> NextEvents:
        """What a queue would deliver next, without leasing it: due retries first, then fresh events.

        At most `max` events (20), in the order of the log, after looking at about `look` numbers of it
        (10,000). Ordered and fair queues deliver in another order: leased keys wait, tenants take turns.
        """
        statement = call("next_events", queue=queue, max=max, look=look)
        return wire.next_events((await self._timed_rows(statement, conn))[0][0])

    async def event_fate(
        self,
        id: UUID,
        around: datetime | None = None,
        look: int | None = None,
        max: int | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> EventFate:
        """What became of an event: where it is, and where it stands in every queue and at every endpoint.

        Costs the same with a log and a backlog of any size. An id that the publisher chose is looked for
        among `look` events (20,000) `around` a time, by default the one that a version 7 UUID holds. At most
        `max` consumers, by default 1,000.
        """
        statement = call("event_fate", id=id, around=around, look=look, max=max)
        if conn is None:
            try:
                return wire.event_fate((await self._rows(statement, None))[0][0])
            except TimeoutRequired:
                # A queue asks by an SQL condition.
                pass
        return wire.event_fate((await self._timed_rows(statement, conn))[0][0])

    async def workers(self, *, conn: AsyncConnectionLike | None = None) -> list[WorkerStatus]:
        """The processes that run handlers: all of them for admins, those of its own role for another role."""
        return [WorkerStatus.of(row) for row in await self._rows(statements.WORKERS, conn)]

    async def queue_disagreements(
        self,
        name: str | None = None,
        worker: UUID | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> list[Disagreement]:
        """Where the live workers of a queue declare it differently, and queues that code has left behind.

        Of the queue `name`, or of the queues that a worker declares or its program left behind.
        """
        return [Disagreement(*row) for row in await self._rows(statements.disagreements(name, worker), conn)]

    async def worker_heartbeat(
        self,
        worker: UUID,
        host: str,
        pid: int,
        queues: Sequence[str],
        backends: Sequence[int] | None = None,
        app: str | None = None,
        shared: bool | None = None,
        handled: Sequence[str] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> bool:
        """Say that a worker lives, and which server processes are its connections. Apps do so themselves.

        `app`: the name of its app; `shared`: whether the app shares its queues with apps of other names;
        `handled`: all queues that its code has handlers of, by default `queues`.
        """
        statement = call(
            "worker_heartbeat",
            worker=worker,
            host=host,
            pid=pid,
            queues=queues,
            backends=backends,
            app=app,
            shared=shared,
            handled=handled,
        )
        return bool(await self._value(statement, conn))

    async def worker_depart(self, worker: UUID, *, conn: AsyncConnectionLike | None = None) -> None:
        """Say that a worker stops."""
        await self._rows(call("worker_depart", worker=worker), conn)
