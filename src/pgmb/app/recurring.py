"""An app's schedules, and the Scheduler that runs while it works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pgmb._async.broker import AsyncBroker
from pgmb.errors import PermissionDenied

logger = logging.getLogger("pgmb.app")


@asynccontextmanager
async def scheduling(broker: AsyncBroker, schedules: Mapping[str, dict[str, Any]]) -> AsyncGenerator[None]:
    """Create or change the schedules, and publish what is due of any until the end of the block.

    Every process of the app does: each due time publishes once.
    """
    if not await _declared(broker, schedules):
        yield
        return
    # Not above: a program that only publishes need not load them.
    from pgmb.services import Scheduler, serve

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(broker, [Scheduler()], stop), name="pgmb scheduler")
        try:
            yield
        finally:
            stop.set()


async def _declared(broker: AsyncBroker, schedules: Mapping[str, dict[str, Any]]) -> bool:
    try:
        for name, settings in schedules.items():
            await broker.create_schedule(name, **settings)
    except PermissionDenied as error:
        # They may be there, and `pgmb serve` may run them under another role.
        logger.warning("schedules are left as they are: %s", error)
        return False
    return bool(schedules)
