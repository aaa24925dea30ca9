"""What the doctor finds, asked now and then for all who look."""

from __future__ import annotations

import asyncio
import time

from pgmb._async.broker import AsyncBroker
from pgmb.doctor import Finding, aexamine

_EXAMINED_EVERY = 30.0


class Health:
    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._lock = asyncio.Lock()
        self._at = 0.0
        self._found: list[Finding] | None = None

    async def findings(self) -> list[Finding]:
        async with self._lock:
            if self._found is None or time.monotonic() - self._at > _EXAMINED_EVERY:
                async with self._broker.connection() as connection:
                    self._found = await aexamine(connection)
                self._at = time.monotonic()
            return self._found
