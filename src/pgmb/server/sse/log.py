"""What is read of the database: ticks, the events between two of them, and which of those pass a filter."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

from pgmb._async.broker import AsyncBroker
from pgmb.errors import StandbyError, TimeoutRequired
from pgmb.server.asking import rows
from pgmb.server.sse.interest import Question
from pgmb.server.sse.mark import Mark, check_of
from pgmb.types import Event, Position

PAGE: Final = 1000
FILTER_WITHIN: Final = 2.0
"""Seconds that a filter has for a page."""
COSTLY_WITHIN: Final = 0.5
"""Seconds that one has that might take longer: see pgmb_internal.is_costly."""

_NEWEST: Final = "select tick, at, position::text from pgmb.newest_tick(%s)"
_FILTERED: Final = (
    "select seq, topic from pgmb.between_filtered(stream => %s::text, after => %s::pgmb.position,"
    " upto => %s::pgmb.position, after_seq => %s::bigint, max => %s::bigint, filter => %s::text,"
    " params => %s::jsonb)"
)
_TICKS: Final = "select tick, at, position::text from pgmb.ticks(%s, %s)"


class Tick(NamedTuple):
    """A position under its number."""

    number: int
    at: datetime | None
    position: Position

    def mark(self, upto: Tick | None = None, seq: int = 0) -> Mark:
        """Where a reader stands that has read all before this tick, and up to `seq` what `upto` adds."""
        upto = upto or self
        check = check_of(self.position, upto.position)
        return Mark(self.position.epoch, self.number, upto.number, seq, check)


class Log:
    """One stream, as those who serve its readers see it."""

    def __init__(self, broker: AsyncBroker, stream: str) -> None:
        self.stream = stream
        self._broker = broker

    async def tick(self) -> None:
        """Name what happened since; on a replica others do."""
        try:
            await self._broker.tick(self.stream)
        except StandbyError:
            return

    async def newest(self) -> Tick:
        (row,) = await rows(self._broker, _NEWEST, (self.stream,))
        return Tick(row[0], row[1], Position.parse(row[2]))

    async def ticks(self, numbers: Iterable[int]) -> dict[int, Tick]:
        """Those that are still there."""
        found = await rows(self._broker, _TICKS, (self.stream, list(numbers)))
        return {row[0]: Tick(row[0], row[1], Position.parse(row[2])) for row in found}

    async def between(self, after: Tick, upto: Tick, seq: int) -> list[Event]:
        """A page of the events between two ticks."""
        return await self._broker.between(self.stream, after.position, upto.position, seq, PAGE)

    async def passing(
        self, question: Question, after: Tick, upto: Tick, seq: int, *, costly: bool = True
    ) -> set[int]:
        """The numbers of those on that page that pass a filter. QueryCanceled if that takes too long."""
        within = COSTLY_WITHIN if costly else FILTER_WITHIN
        page = await self._filtered(question, str(after.position), str(upto.position), seq, PAGE, within)
        return {seq for seq, topic in page if topic is not None}

    async def check(self, question: Question) -> bool:
        """Refuse what is not a filter. Returns whether it might take long."""
        try:
            # Without positions nothing is read, and without a limit it tells whether it needs one.
            await self._filtered(question, None, None, 0, 0, 0)
        except TimeoutRequired:
            return True
        return False

    async def _filtered(
        self, question: Question, after: str | None, upto: str | None, seq: int, most: int, within: float
    ) -> list[Any]:
        given = (self.stream, after, upto, seq, most, *question)
        return await rows(self._broker, _FILTERED, given, within=within)
