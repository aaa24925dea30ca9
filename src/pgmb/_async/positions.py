"""Positions in a stream's history, and the events between two of them."""

from __future__ import annotations

from datetime import datetime

from pgmb._async.calls import AsyncCalls
from pgmb._core import statements, wire
from pgmb._core.statements import call
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Event, Position, Source


class AsyncPositions(AsyncCalls):
    async def position(self, stream: str = "main", *, conn: AsyncConnectionLike | None = None) -> Position:
        """The stream's position now: everything committed by this moment lies before it."""
        return await self._position(statements.position("position", stream=stream), conn)

    async def earliest(self, stream: str = "main", *, conn: AsyncConnectionLike | None = None) -> Position:
        """The position before the stream's first event."""
        return await self._position(statements.position("earliest", stream=stream), conn)

    async def position_at(
        self, stream: str, at: datetime, *, conn: AsyncConnectionLike | None = None
    ) -> Position:
        """The newest position that a tick recorded at or before `at`."""
        return await self._position(statements.position("position_at", stream=stream, at=at), conn)

    async def position_of(
        self, stream: str, tick: int, *, conn: AsyncConnectionLike | None = None
    ) -> Position:
        """The position that a tick's id names. HistoryGone when there is no such tick any more."""
        return await self._position(statements.position("position_of", stream=stream, tick=tick), conn)

    async def between(
        self,
        stream: str,
        after: Position,
        upto: Position,
        after_seq: int = 0,
        max: int = 1000,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> list[Event]:
        """The events between two positions, in order; the same pair gives the same events.

        To go on after a full page, pass the last event's `seq` as `after_seq`.
        """
        rows = await self._rows(statements.between(stream, after, upto, after_seq, max), conn)
        return wire.events(rows, Source(stream, 0))

    async def confirm(
        self, stream: str, reader: str, at: Position, *, conn: AsyncConnectionLike | None = None
    ) -> None:
        """Record how far a reader outside the database has come: retention keeps what lies after it."""
        await self._value(statements.confirm(stream, reader, at), conn)

    async def forget(self, stream: str, reader: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Forget such a reader. True if there was one."""
        return bool(await self._value(call("forget", stream=stream, reader=reader), conn))

    async def tick(self, stream: str = "main", *, conn: AsyncConnectionLike | None = None) -> int | None:
        """Store the stream's position under a short name, wake sleepers. None if nothing happened since."""
        number: int | None = await self._value(call("tick", stream=stream), conn)
        return number

    async def _position(self, statement: statements.Statement, conn: AsyncConnectionLike | None) -> Position:
        return Position.parse(await self._value(statement, conn))
