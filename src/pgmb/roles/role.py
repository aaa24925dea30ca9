"""What a background role is, and how some run together."""

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

logger = logging.getLogger("pgmb.roles")

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


class Role(Protocol):
    """Something to be done again and again. Several processes may run the same role at once."""

    name: str

    async def turn(self, broker: AsyncBroker) -> float:
        """Do what is due now, and return after how many seconds to look again."""
        ...


@runtime_checkable
class Ending(Protocol):
    """A role that has something to give back when it ends."""

    async def close(self, broker: AsyncBroker) -> None: ...


async def serve(broker: AsyncBroker, roles: Sequence[Role], stop: asyncio.Event) -> None:
    """Run roles side by side until `stop` is set. Each finishes its turn."""
    async with asyncio.TaskGroup() as group:
        for role in roles:
            group.create_task(_run(broker, role, stop), name=role.name)


async def _run(broker: AsyncBroker, role: Role, stop: asyncio.Event) -> None:
    failures = 0
    while not stop.is_set():
        try:
            pause = await role.turn(broker)
            failures = 0
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            # The server is restarting, or something is in the way: nothing that giving up would mend.
            pause = min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE)
            failures += 1
            logger.warning("%s: %s; again in %.1f s", role.name, error, pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
    if isinstance(role, Ending):
        await _close(broker, role)


async def _close(broker: AsyncBroker, role: Ending) -> None:
    try:
        await role.close(broker)
    except (psycopg.Error, PoolTimeout, PgmbError) as error:
        # What it held comes back when its leases expire.
        logger.warning("could not give back what was under way: %s", error)
