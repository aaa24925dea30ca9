"""The interface of a background service, and running several together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker
from pgmb.errors import PgmbError

logger = logging.getLogger("pgmb.services")

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class Service(Protocol):
    """Work that is repeated. Several processes may run the same service at once."""

    name: str

    async def turn(self, broker: AsyncBroker) -> float:
        """Do what is due now, and return after how many seconds to look again."""
        ...


@runtime_checkable
class ClosableService(Protocol):
    """A service that releases something when it ends."""

    async def close(self, broker: AsyncBroker) -> None: ...


async def serve(broker: AsyncBroker, services: Sequence[Service], stop: asyncio.Event) -> None:
    """Run services side by side until `stop` is set. Each finishes its turn."""
    async with asyncio.TaskGroup() as group:
        for service in services:
            group.create_task(_run(broker, service, stop), name=service.name)


async def _run(broker: AsyncBroker, service: Service, stop: asyncio.Event) -> None:
    failures = 0
    while not stop.is_set():
        try:
            pause = await service.turn(broker)
            failures = 0
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            # The server is restarting, or something is in the way: nothing that giving up would mend.
            pause = min(_FIRST_PAUSE_SECONDS * 2**failures, _LONGEST_PAUSE_SECONDS)
            failures += 1
            logger.warning("%s: %s; again in %.1f s", service.name, error, pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
    if isinstance(service, ClosableService):
        await _close(broker, service)


async def _close(broker: AsyncBroker, service: ClosableService) -> None:
    try:
        await service.close(broker)
    except (psycopg.Error, PoolTimeout, PgmbError) as error:
        # What it held comes back when its leases expire.
        logger.warning("could not give back what was under way: %s", error)
