"""Background tasks of a consumer: enforce handler timeouts, extend leases in progress."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from pgmb.app import settling
from pgmb.app.handler import Handler
from pgmb.app.hold import Hold
from pgmb.app.worker import Worker
from pgmb.errors import LeaseLost

logger = logging.getLogger("pgmb.app")


async def enforce_timeouts(handlers: Sequence[Handler], workers: Sequence[Worker]) -> None:
    """Cancel handlers that run for longer than their timeout, at most a fifth late."""
    timeouts = [handler.timeout for handler in handlers if handler.timeout is not None]
    if not timeouts:
        return
    tick = min(1.0, max(0.02, min(timeouts) / 10))
    while True:
        await asyncio.sleep(tick)
        now = time.monotonic()
        for worker in workers:
            worker.enforce(now)


async def extend_leases(
    queue: str, holds: Sequence[Hold], lease_for: float, every: float, extended: asyncio.Event
) -> None:
    """Extend the leases in progress. Sets `extended` after each round, so that their events are settled."""
    while True:
        await asyncio.sleep(every)
        now = time.monotonic()
        for hold in list(holds):
            if now - hold.renewed > lease_for * 0.4 and not hold.lost:
                try:
                    await hold.lease.extend()
                    hold.renewed = now
                except LeaseLost as error:
                    if hold in holds:
                        settling.lose(hold, error)
                except settling.TROUBLE as error:
                    logger.warning("queue %s: cannot extend the lease: %s", queue, str(error).strip())
        if holds:
            extended.set()
