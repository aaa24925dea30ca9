"""What the doctor finds, asked now and then for all who look."""

from __future__ import annotations

import asyncio
import contextlib
import time

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker
from pgmb.doctor import Finding, Level, aexamine

_EXAMINED_EVERY = 30.0


class Health:
    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._at = 0.0
        self._found: list[Finding] = []
        self._examining: asyncio.Task[None] | None = None

    async def findings(self) -> list[Finding]:
        """What was found last. Only the first who asks waits for it."""
        idle = self._examining is None or self._examining.done()
        if idle and time.monotonic() - self._at > _EXAMINED_EVERY:
            self._examining = asyncio.create_task(self._examine(), name="dashboard health")
        if not self._found and self._examining is not None:
            await asyncio.shield(self._examining)
        return self._found

    async def close(self) -> None:
        if self._examining is not None:
            self._examining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._examining

    async def _examine(self) -> None:
        try:
            async with self._broker.connection() as connection:
                self._found = await aexamine(connection)
        except (psycopg.Error, PoolTimeout):
            self._found = [Finding("database", Level.FAIL, "the database does not answer")]
        self._at = time.monotonic()
