"""The Ticker names positions and wakes sleepers while there is traffic."""

from __future__ import annotations

import time
from collections.abc import Callable

from pgmb._async.broker import AsyncBroker

_LAST_NUMBERS = "select stream, last from pgmb.last_numbers()"


class Ticker:
    """Ticks each stream every `every` seconds while its numbers move and a second longer, else `idle` apart.

    A look at the sequences, one statement for all streams, says which have moved. The others are ticked too,
    only less often: what a slow transaction commits moves no sequence again, and an event with a delay none
    before it is due.
    """

    name = "ticker"

    def __init__(
        self, every: float = 0.03, idle: float = 0.5, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every = every
        self.idle = idle
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._hot_until: dict[str, float] = {}
        self._ticked_at: dict[str, float] = {}

    async def turn(self, broker: AsyncBroker) -> float:
        now = self._clock()
        async with broker.connection() as conn:
            streams = await (await conn.execute(_LAST_NUMBERS)).fetchall()
        for stream, last_seq in streams:
            if self._seen.get(stream) != last_seq:
                self._seen[stream] = last_seq
                self._hot_until[stream] = now + 1
            if self._due(stream, now):
                self._ticked_at[stream] = now
                # One transaction a stream: a second tick in the same one could not read the sequence again.
                await broker.tick(stream)
        # Idle or not, the sequences are looked at often enough for the first event after a silence.
        return self.every if any(until > now for until in self._hot_until.values()) else self.every * 3

    def _due(self, stream: str, now: float) -> bool:
        if self._hot_until.get(stream, 0) > now:
            return True
        return now - self._ticked_at.get(stream, float("-inf")) >= self.idle
