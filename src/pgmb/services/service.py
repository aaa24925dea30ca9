"""The interface of a background service, and running several together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS, AsyncDeadline
from pgmb.errors import PgmbError
from pgmb.services.leadership import Leadership

logger = logging.getLogger("pgmb.services")

_FIRST_PAUSE_SECONDS: Final = 0.5
_HUNG_SECONDS: Final = 30.0


class Service(Protocol):
    """Work that is repeated. Several processes may run the same service at once."""

    name: str

    async def turn(self, broker: AsyncBroker) -> float:
        """Do what is due now, and return after how many seconds to look again."""
        ...


@runtime_checkable
class ClosableService(Service, Protocol):
    """A service that releases something when it ends."""

    async def close(self, broker: AsyncBroker) -> None: ...


class Turns:
    """When each service began its turn: a service whose turn does not end is hung."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def begin(self, service: str, deadline: float) -> None:
        self._until[service] = self._clock() + deadline + _HUNG_SECONDS

    def end(self, service: str) -> None:
        self._until.pop(service, None)

    def hung(self) -> list[str]:
        """Services whose turn goes on although its connections were closed at its deadline.

        A service that is only slow, or cannot reach the database, is not among them: its turns end.
        """
        now = self._clock()
        return sorted(name for name, until in self._until.items() if until < now)


async def serve(
    broker: AsyncBroker,
    services: Sequence[Service],
    stop: asyncio.Event,
    *,
    turns: Turns | None = None,
    grace: float = AsyncDeadline.FIRST_SECONDS,
    leadership: Leadership | None = None,
) -> None:
    """Run services side by side until `stop` is set. Each has `grace` seconds to finish its turn then.

    With `leadership`, a service that another process leads waits.
    """
    turns = turns or Turns()
    everything = services if leadership is None else [*services, leadership]
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_run(broker, service, stop, turns, leadership), name=service.name)
            for service in everything
        ]
        ending = group.create_task(stop.wait())
        await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not stop.is_set():
            return
        _, late = await asyncio.wait(running, timeout=grace)
        while late:
            # What they wait for is an answer that does not come. Repeated: they may wait for the next one.
            for task in late:
                broker.break_off(task)
            _, late = await asyncio.wait(late, timeout=1.0)


async def _run(
    broker: AsyncBroker, service: Service, stop: asyncio.Event, turns: Turns, leadership: Leadership | None
) -> None:
    failures, deadline = 0, AsyncDeadline(service.name, broker.break_off)
    while not stop.is_set():
        if leadership is not None:
            await leadership.wait_for(service.name, stop)
            if stop.is_set():
                break
        turns.begin(service.name, deadline.seconds)
        try:
            with deadline.enforced():
                pause = await service.turn(broker)
            failures = 0
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            # The server is restarting, or something is in the way: nothing that giving up would mend.
            pause = min(_FIRST_PAUSE_SECONDS * 2**failures, LONGEST_RETRY_SECONDS)
            failures = min(failures + 1, 10)
            logger.warning("%s: %s; retrying in %.1f s", service.name, error, pause)
        finally:
            turns.end(service.name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
    if isinstance(service, ClosableService):
        await _close(broker, service)


async def _close(broker: AsyncBroker, service: ClosableService) -> None:
    try:
        await service.close(broker)
    except (psycopg.Error, PoolTimeout, PgmbError) as error:
        # What it held comes back when its leases expire.
        logger.warning("%s: could not release what it held: %s", service.name, error)
