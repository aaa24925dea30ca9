"""Background tasks of a consumer: enforce handler timeouts, extend leases in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pgmb._async.broker import AsyncBroker
from pgmb._core import loggers
from pgmb._core.concurrency import AsyncDeadline
from pgmb.app import settling
from pgmb.app.handler import Handler
from pgmb.app.progress import LeaseProgress
from pgmb.app.worker import Worker
from pgmb.errors import LeaseLost

logger = loggers.logger("pgmb.app")


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
    broker: AsyncBroker,
    queue: str,
    in_progress: Sequence[LeaseProgress],
    lease_for: Callable[[], float],
    every: float,
    extended: asyncio.Event,
    deadline: AsyncDeadline,
) -> None:
    """Extend the leases in progress. Sets `extended` after each round, so that their events are settled."""
    while True:
        await asyncio.sleep(every)
        now = time.monotonic()
        for progress in list(in_progress):
            if progress.to_be_extended(now, lease_for()):
                try:
                    with deadline.enforced():
                        progress.extended_for = await settling.extend(broker, progress.lease)
                    progress.renewed = now
                except LeaseLost as error:
                    if progress in in_progress:
                        settling.lose(progress, error)
                except settling.DATABASE_ERRORS as error:
                    logger.warning("queue %s: cannot extend the lease: %s", queue, str(error).strip())
        if in_progress:
            extended.set()
