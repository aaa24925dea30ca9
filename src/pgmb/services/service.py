"""The interface of a background service, and running several together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
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
_GIVE_UP_AFTER: Final = 10
"""Unexpected errors of a service in a row. Then the process ends, for another to do better."""
_RECOVERED_SECONDS: Final = 60.0
"""A service that ran for so long since its last unexpected error has recovered."""


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


@runtime_checkable
class RestartableService(ClosableService, Protocol):
    """A service that keeps something when it is started again after an error."""

    async def restart(self, broker: AsyncBroker) -> None: ...


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

    With `leadership`, a service that another process leads waits. A service that raises an unexpected error
    is started again. After ten such errors in a row all services are stopped, and the last error is raised.
    """
    turns = turns or Turns()
    everything = services if leadership is None else [*services, leadership]
    given_up: list[Exception] = []
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_run(broker, service, stop, turns, leadership, given_up), name=service.name)
            for service in everything
        ]
        ending = group.create_task(stop.wait())
        await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        _, late = await asyncio.wait(running, timeout=grace)
        while late:
            # What they wait for is an answer that does not come. Repeated: they may wait for the next one.
            for task in late:
                broker.break_off(task)
            _, late = await asyncio.wait(late, timeout=1.0)
    if given_up:
        raise given_up[0]


async def _run(
    broker: AsyncBroker,
    service: Service,
    stop: asyncio.Event,
    turns: Turns,
    leadership: Leadership | None,
    given_up: list[Exception],
) -> None:
    failures, deadline = 0, AsyncDeadline(service.name, broker.break_off)
    unexpected, failed_at = 0, 0.0
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
        except Exception as error:
            now = time.monotonic()
            unexpected = 1 if now - failed_at > _RECOVERED_SECONDS else unexpected + 1
            failed_at = now
            if unexpected >= _GIVE_UP_AFTER:
                logger.critical("%s: failed %d times in a row; giving up", service.name, unexpected)
                given_up.append(error)
                stop.set()
                break
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** (unexpected - 1), LONGEST_RETRY_SECONDS)
            logger.exception("%s: unexpected error; starting it again in %.1f s", service.name, pause)
            if isinstance(service, RestartableService):
                await _close(service.name, service.restart(broker))
            elif isinstance(service, ClosableService):
                await _close(service.name, service.close(broker))
        finally:
            turns.end(service.name)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
    if isinstance(service, ClosableService):
        await _close(service.name, service.close(broker))


async def _close(name: str, closing: Awaitable[None]) -> None:
    try:
        await closing
    except Exception as error:
        # What it held comes back when its leases expire.
        known = isinstance(error, psycopg.Error | PoolTimeout | PgmbError)
        logger.warning(
            "%s: could not release what it held: %s", name, error, exc_info=None if known else error
        )
