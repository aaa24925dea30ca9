"""Positions in a stream's history, and the events between two of them."""

from __future__ import annotations

from datetime import datetime

from pgmb._async.calls import AsyncCalls, Pool
from pgmb._core import statements, wire
from pgmb._core.concurrency import aoff_loop
from pgmb._core.lake import LakePages, Place
from pgmb._core.statements import Filter, call
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Event, LakeAccess, Position, Source


class AsyncPositions(AsyncCalls):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._lakes: dict[tuple[object, ...], LakePages] = {}

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
        lake: LakeAccess | bool = True,
        conn: AsyncConnectionLike | None = None,
    ) -> list[Event]:
        """The events between two positions, in order; the same pair gives the same events.

        A page may have fewer than `max` events where they are large. To go on, pass the last event's `seq` as
        `after_seq`, until a page is empty. What the log has dropped is
        read from the stream's lake, which needs `pgmb[lake]`; HistoryGone if it is not there either. `lake`
        says how to reach it; with False only the log is read.
        """
        if lake is False:
            rows = await self._rows(statements.between(stream, after, upto, after_seq, max), conn)
            return wire.events(rows, Source(stream, 0))
        access = LakeAccess() if lake is True else lake
        pages = self._lakes.setdefault(access.key, LakePages(access))
        found: list[Event] = []
        at: int | None = after_seq
        while at is not None and len(found) < max and wire.text_bytes(found) < wire.BATCH_BYTES:
            place = Place(stream, after, upto, at)
            events, at = await self._both(place, max - len(found), pages, None, conn)
            found += events
        return found

    async def _both(
        self,
        place: Place,
        limit: int,
        pages: LakePages,
        asked: Filter | None,
        conn: AsyncConnectionLike | None,
    ) -> tuple[list[Event], int | None]:
        """A page of log or lake: the events that pass, and the seq with which it ended if more may follow."""
        source = Source(place.stream, 0)
        reading = pages.take(place)
        if reading is None:
            statement = statements.between_both(*place, limit, asked)
            read = self._rows if asked is None else self._timed_rows
            rows = await read(statement, conn)
            if not rows or rows[-1][8] is None:
                found = wire.events((row for row in rows if row[2] is not None), source)
                goes_on = bool(rows) if asked is not None else wire.may_go_on(found, limit)
                return found, rows[-1][0] if goes_on else None
            # What the lake alone has comes before all that the log has.
            told = [row[8] for row in rows if row[8] is not None]
            opened = pages.begin(place, told)
        else:
            opened = reading
        found = await aoff_loop(lambda: opened.page(limit))
        if asked is not None and found:
            passing = set((await self._timed_rows(statements.passing(found, asked), conn))[0][0])
            found = [event for event in found if event.seq in passing]
        pages.keep(place, opened)
        return found, opened.scanned_to

    async def confirm(
        self,
        stream: str,
        reader: str,
        at: Position,
        expected: Position | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Record how far a reader outside the database has come: retention keeps what lies after it.

        expected   what this reader confirmed last. Raises Conflict if another one of its name has moved it
        """
        await self._value(statements.confirm(stream, reader, at, expected), conn)

    async def forget(self, stream: str, reader: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Forget such a reader. True if there was one."""
        return bool(await self._value(call("forget", stream=stream, reader=reader), conn))

    async def tick(self, stream: str = "main", *, conn: AsyncConnectionLike | None = None) -> int | None:
        """Store the stream's position under a short name, wake sleepers. None if nothing happened since."""
        number: int | None = await self._value(call("tick", stream=stream), conn)
        return number

    async def _position(self, statement: statements.Statement, conn: AsyncConnectionLike | None) -> Position:
        return Position.parse(await self._value(statement, conn))
