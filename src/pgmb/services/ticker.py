"""The Ticker names positions and wakes sleepers while there is traffic."""

from __future__ import annotations

import time
from collections.abc import Callable

from pgmb._async.broker import AsyncBroker

_STREAMS = "select stream, tick, moved, ended from pgmb.streams_to_tick()"
_ALL = "select pgmb.tick(stream), pg_notify('pgmb', stream || ' -') from pgmb.streams_to_tick(idle => true)"


class Ticker:
    """Ticks the streams with news, which one statement finds.

    It runs every `every` seconds while there is traffic, and at rest up to four times less often.
    Every `all_every` seconds the ticker ticks all streams and notifies listeners that it runs.
    """

    name = "ticker"

    def __init__(
        self, every: float = 0.06, all_every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every = every
        self.all_every = all_every
        self._clock = clock
        self._ticked_at = float("-inf")
        self._all_ticked_at = float("-inf")
        self._in_vain: dict[str, tuple[int, int]] = {}

    async def turn(self, broker: AsyncBroker) -> float:
        now = self._clock()
        async with broker.own_connection() as conn:
            streams = await (await conn.execute(_STREAMS)).fetchall()
        for stream, tick, moved, ended in streams:
            # Transactions that ended without publishing need only one attempt.
            if moved or self._in_vain.get(stream) != (tick, ended):
                # One transaction a stream: a second tick in the same one could not read the sequence again.
                if await broker.tick(stream) is None:
                    self._in_vain[stream] = (tick, ended)
                else:
                    self._ticked_at = now
        if now - self._all_ticked_at >= self.all_every:
            self._all_ticked_at = now
            async with broker.own_connection() as conn:
                await conn.execute(_ALL)
        return self._pause(now - self._ticked_at)

    def _pause(self, rested: float) -> float:
        """Seconds to the next turn, the longest that the first event after a silence waits for its tick."""
        if rested < 0.1:
            return self.every
        return self.every * 1.5 if rested < 10.0 else self.every * 4
