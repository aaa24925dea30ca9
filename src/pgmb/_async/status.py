"""Status: what stands where."""

from __future__ import annotations

from pgmb._async.calls import AsyncCalls
from pgmb._core import statements
from pgmb._core.statements import call
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import QueueStatus, ReaderStatus, SinkStatus, StreamStatus


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
