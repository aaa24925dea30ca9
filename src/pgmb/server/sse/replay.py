"""What a reader missed: out of memory, or read from the log, until it can join the tail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

import psycopg

from pgmb._core.cursor import later
from pgmb.errors import ForeignPosition, HistoryGone, PositionLost
from pgmb.server.counts import Counts
from pgmb.server.limits import Limits
from pgmb.server.remembered import Remembered
from pgmb.server.sse.interest import Document, Question
from pgmb.server.sse.log import PAGE, Tick
from pgmb.server.sse.mark import Mark
from pgmb.server.sse.reader import Reader
from pgmb.server.sse.recent import Entry
from pgmb.server.sse.tail import Tail
from pgmb.types import Event

Found = TypeVar("Found")

_AT_ONCE: Final = 4
"""Reads at a time: the broker's connections are for others too."""
_KEPT: Final = 64
"""Of each kind of read, the last ones: what they found does not change."""
_PATIENCE: Final = 1.0


class Gone(Exception):  # noqa: N818
    """What was missed cannot be had: the reader has to start anew."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Replay:
    """Of one tail. Readers come back in crowds: what several of them missed is read once."""

    def __init__(self, tail: Tail, limits: Limits, counts: Counts) -> None:
        self._tail = tail
        self._limits = limits
        self._counts = counts
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._ticks: Remembered[tuple[int, int], dict[int, Tick]] = Remembered(_KEPT)
        self._pages: Remembered[tuple[int, int, int], list[Event]] = Remembered(_KEPT)
        self._passing: Remembered[tuple[int, int, int, Question], set[int]] = Remembered(_KEPT)

    async def catch_up(self, reader: Reader, mark: Mark) -> AsyncGenerator[list[Entry]]:
        """What it missed since the mark, in order. At its end the reader has joined the tail."""
        tail = self._tail
        looked_at = 0
        while not reader.ended:
            missed = tail.join(reader, mark)
            if missed is not None:
                self._counts.sse_replayed += len(missed)
                yield missed
                return
            after, upto = await self._span(mark)
            if after.number == upto.number and not later(tail.at.position, after.position):
                if not later(after.position, tail.at.position):
                    # Two ticks of the same moment.
                    mark = tail.at.mark()
                else:
                    # Another process was ahead of this one.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(tail.advanced(), _PATIENCE)
                continue
            if after.number == upto.number:
                upto = tail.at
                mark = after.mark(upto)
            seq = mark.seq if mark.done != mark.batch else 0
            while not reader.ended:
                events = await self._page(after, upto, seq)
                looked_at += len(events)
                if looked_at > self._limits.replay_events:
                    raise Gone("too_many")
                entries = await self._matching(reader, events, after, upto, seq)
                self._counts.sse_replayed += len(entries)
                if entries:
                    yield entries
                if len(events) < PAGE:
                    break
                seq = events[-1].seq
            mark = upto.mark()

    async def _span(self, mark: Mark) -> tuple[Tick, Tick]:
        """The ticks that a mark names."""
        if mark.epoch != self._tail.at.position.epoch:
            raise Gone("epoch")
        numbers = (mark.done, mark.batch)
        ticks = await self._ticks.get(numbers, partial(self._read, self._tail.log.ticks, numbers))
        after, upto = ticks.get(mark.done), ticks.get(mark.batch)
        if after is None or upto is None or later(after.position, upto.position):
            raise Gone("history_gone")
        if after.mark(upto, mark.seq) != mark:
            raise Gone("lost")
        oldest = datetime.now(UTC) - timedelta(seconds=self._limits.replay_age)
        if after.at is not None and after.at < oldest:
            raise Gone("too_old")
        return after, upto

    async def _page(self, after: Tick, upto: Tick, seq: int) -> list[Event]:
        try:
            return await self._pages.get(
                (after.number, upto.number, seq),
                partial(self._read, self._tail.log.between, after, upto, seq),
            )
        except HistoryGone as error:
            raise Gone("history_gone") from error
        except (PositionLost, ForeignPosition) as error:
            raise Gone("lost") from error

    async def _read(self, read: Callable[..., Coroutine[Any, Any, Found]], *given: Any) -> Found:
        async with self._gate:
            return await read(*given)

    async def _matching(
        self, reader: Reader, events: list[Event], after: Tick, upto: Tick, seq: int
    ) -> list[Entry]:
        interest = reader.interest
        found = [event for event in events if interest.matches(event, Document(event))]
        question = interest.question
        if question is not None and found:
            try:
                passed = await self._passing.get(
                    (after.number, upto.number, seq, question),
                    partial(self._read, self._tail.log.passing, question, after, upto, seq),
                )
            except psycopg.errors.QueryCanceled:
                self._tail.refuse(question, reader)
                raise
            found = [event for event in found if event.seq in passed]
        return [Entry(event, after.mark(upto, event.seq)) for event in found]
