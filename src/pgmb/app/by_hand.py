"""Handling a queue by hand: so many events, here and now, without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import AsyncLease
from pgmb.app import settling
from pgmb.app.declaring import QueueSpec, declare
from pgmb.app.handling import Handled, handle_lease
from pgmb.app.routing import Middleware, Routes
from pgmb.app.threads import Threads
from pgmb.errors import LeaseLost

logger = logging.getLogger("pgmb.app")


async def handle(broker: AsyncBroker, spec: QueueSpec, middlewares: Sequence[Middleware], limit: int) -> int:
    """Call a queue's handlers for its next events. Returns how many there were."""
    queue = spec.name
    found = (await declare(broker, [spec]))[queue]
    threads, count = Threads("pgmb handler"), 0
    routes = Routes(queue, spec.handlers, middlewares, threads)
    try:
        while count < limit:
            # One event a lease, unless the handler takes more: each is settled as it was handled, in order.
            lease = await broker.receive(queue, min(limit - count, routes.size))
            if not lease:
                break
            count += len(lease)
            async with _kept(lease, found.lease_for):
                try:
                    handled = await handle_lease(routes, lease, found.max_attempts)
                except LeaseLost as error:
                    logger.warning("queue %s: %s; what it held is delivered again", queue, error)
                else:
                    _log(handled)
    finally:
        threads.close()
    return count


@contextlib.asynccontextmanager
async def _kept(lease: AsyncLease, lease_for: float) -> AsyncGenerator[None]:
    """Prolong the lease for as long as this lasts."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(lease_for * 0.4)
            try:
                await lease.extend()
            except LeaseLost:
                return
            except settling.DATABASE_ERRORS as error:
                logger.warning("queue %s: cannot extend the lease: %s", lease.queue, str(error).strip())

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def _log(handled: list[Handled]) -> None:
    for one in handled:
        if one.error is not None:
            logger.warning(
                "queue %s: %s: %s (seq %s, %s, attempt %s)",
                one.queue,
                one.outcome,
                one.error,
                one.event.seq,
                one.event.topic,
                one.event.attempt,
                exc_info=one.error,
            )
