"""What looks after a consumer's workers: timeouts, and leases that must be prolonged."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from pgmb.app import settling
from pgmb.errors import LeaseLost

if TYPE_CHECKING:
    from pgmb.app.consumer import Consumer

logger = logging.getLogger("pgmb.app")


async def watch(consumer: Consumer) -> None:
    """Break off handlers that run for longer than their timeout: at most a fifth late."""
    timeouts = [handler.timeout for handler in consumer.routes.handlers if handler.timeout is not None]
    if not timeouts:
        return
    tick = min(1.0, max(0.02, min(timeouts) / 10))
    while True:
        await asyncio.sleep(tick)
        now = time.monotonic()
        for worker in consumer.workers:
            worker.enforce(now)


async def keep(consumer: Consumer) -> None:
    """Prolong leases that are being worked on, and have what is done of them settled now and then."""
    while True:
        await asyncio.sleep(consumer.sweep_every)
        now = time.monotonic()
        for hold in consumer.holds[:]:
            if now - hold.renewed > consumer.lease_for * 0.4 and not hold.lost:
                try:
                    await hold.lease.extend()
                    hold.renewed = now
                except LeaseLost as error:
                    if hold in consumer.holds:
                        settling.lose(hold, error)
                except settling.TROUBLE as error:
                    logger.warning("queue %s: cannot extend the lease: %s", consumer.name, str(error).strip())
        if consumer.holds:
            consumer.bell.set()
