"""The readers of this process: a tail for each stream that somebody reads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable
from typing import Final, NamedTuple

from pgmb.server.context import Context
from pgmb.server.problems import Problem, busy
from pgmb.server.sse.interest import Interest
from pgmb.server.sse.log import Log
from pgmb.server.sse.replay import Replay
from pgmb.server.sse.tail import Tail
from pgmb.server.tasks import end

BEAT_EVERY: Final = 15.0
_PARTS: Final = 15
"""Not all hearts beat at once."""
_IDLE_BEATS: Final = 4
"""A tail that nobody read for so many beats is given up."""
_MOST_FILTERS: Final = 100
"""Different filters of a stream, each of which asks the database about every event."""


class Source(NamedTuple):
    """A stream as it is read here."""

    tail: Tail
    replay: Replay


class Hub:
    """Made by `routes`; ends with the application."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sources: dict[str, Source] = {}
        self._idle: dict[str, int] = {}
        self._opening = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        context.on_drain(self.drain)
        context.on_close(self.close)

    async def source(self, stream: str) -> Source:
        """A stream, read from now on if nobody did."""
        if self._context.draining:
            raise Problem(503, "draining", "this process is about to end", headers={"Retry-After": "1"})
        if self._context.counts.sse_clients >= self._context.limits.clients:
            raise busy("no more readers fit in here")
        async with self._opening:
            found = self._sources.get(stream)
            if found is None:
                found = self._sources[stream] = await self._open(stream)
            self._idle[stream] = 0
        return found

    async def announce(self, source: Source, interest: Interest, who: Hashable) -> None:
        """A reader with this interest is about to come."""
        tail = source.tail
        fresh = interest.question is not None and interest.question not in tail.questions
        if fresh and len(tail.questions) >= _MOST_FILTERS:
            raise busy("too many different filters are read here")
        await tail.announce(interest, who)

    async def drain(self) -> None:
        """Send readers away: they come back, to another process or to this one when it is back."""
        for source in self._sources.values():
            for reader in list(source.tail.readers):
                reader.end()

    async def close(self) -> None:
        if self._beating is not None:
            await end(self._beating)
        sources, self._sources = self._sources, {}
        for source in sources.values():
            await source.tail.close()

    async def _open(self, stream: str) -> Source:
        broker, counts = self._context.broker, self._context.counts
        subscription = broker.listener().subscribe(stream)
        # Far less than what may wait for a reader.
        at_once = max(1, min(100, self._context.limits.pending_events // 4))
        tail = Tail(Log(broker, stream), subscription, counts, at_once)
        try:
            await tail.start()
        except BaseException:
            subscription.close()
            raise
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat(), name="pgmb beat")
        return Source(tail, Replay(tail, self._context.limits, counts))

    async def _beat(self) -> None:
        for part in itertools.cycle(range(_PARTS)):
            await asyncio.sleep(BEAT_EVERY / _PARTS)
            for stream, source in list(self._sources.items()):
                await source.tail.beat(part, _PARTS)
                if source.tail.readers:
                    self._idle[stream] = 0
                elif part == 0:
                    await self._give_up(stream, source)

    async def _give_up(self, stream: str, source: Source) -> None:
        async with self._opening:
            self._idle[stream] += 1
            if self._idle[stream] > _IDLE_BEATS and not source.tail.readers:
                del self._sources[stream], self._idle[stream]
                await source.tail.close()
