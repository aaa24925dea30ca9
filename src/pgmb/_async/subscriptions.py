"""Keeping subscriptions: one call in a while says that all of them are in use."""

from __future__ import annotations

import threading
import time
from uuid import UUID

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout

from pgmb._async.calls import AsyncCalls, Pool
from pgmb._core import groups, loggers
from pgmb._core.concurrency import AsyncBackground, AsyncFlag
from pgmb.errors import PgmbError

logger = loggers.logger("pgmb.group")

_LONGEST_PAUSE_SECONDS = 300.0


class AsyncKeeper(AsyncCalls):
    """Keeps subscriptions from expiring while this process lives, beside the caller's work."""

    def __init__(self, pool: Pool, group: str) -> None:
        super().__init__(pool)
        self._group = group
        self._kept: dict[UUID, tuple[float, float]] = {}
        """The seconds in which each expires, and when it was last there."""
        self._lock = threading.Lock()
        self._changed = AsyncFlag()
        self._closing = False
        self._background: AsyncBackground | None = None

    def keep(self, id: UUID, expires_after: float) -> None:
        with self._lock:
            self._kept[id] = (expires_after, time.monotonic())
            if self._background is None and not self._closing:
                self._background = AsyncBackground("pgmb subscriptions", self._run)
        self._changed.set()

    def forget(self, id: UUID) -> None:
        with self._lock:
            self._kept.pop(id, None)

    async def close(self) -> None:
        self._closing = True
        self._changed.set()
        background, self._background = self._background, None
        if background is not None:
            await background.stop(None)

    async def _run(self) -> None:
        while not self._closing:
            with self._lock:
                shortest = min((after for after, _ in self._kept.values()), default=_LONGEST_PAUSE_SECONDS)
            # A row is written once in a quarter of its time at most.
            if await self._changed.wait(min(shortest / 4, _LONGEST_PAUSE_SECONDS)):
                self._changed.clear()
                continue
            try:
                await self._keep_all()
            except PoolClosed:
                return
            except (psycopg.Error, PgmbError, PoolTimeout, OSError) as error:
                logger.warning("group %s: cannot keep its subscriptions: %s", self._group, error)

    async def _keep_all(self) -> None:
        with self._lock:
            named = list(self._kept)
        if not named:
            return
        rows = await self._rows(groups.keep_subscriptions(named), None)
        present = {UUID(bytes=row[0]) for row in rows}
        now = time.monotonic()
        for id in named:
            with self._lock:
                expires_after, seen = self._kept.get(id, (0.0, now))
                if id in present:
                    self._kept[id] = (expires_after, now)
                    continue
                # Its transaction may not have committed yet.
                if now - seen < expires_after or self._kept.pop(id, None) is None:
                    continue
            logger.warning("group %s: subscription %s is gone", self._group, id)
