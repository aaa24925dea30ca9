"""Leader election: of all processes that run a service, one does its work."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable
from typing import Final
from uuid import UUID, uuid4

from pgmb._async.broker import AsyncBroker
from pgmb.errors import translated

logger = logging.getLogger("pgmb.services")

ELECTED: Final = frozenset({"janitor", "scheduler", "ticker"})
"""Services that one process does for all."""

_LEAD = "select pgmb.lead(%s, %s::text[], %s, %s, %s)"
_RENEW_EVERY_SECONDS: Final = 2.0


class Leadership:
    """Says which services this process leads. Run it beside them; at its end others take over.

    A process that cannot ask goes on as before: several leaders cost work, and do no harm.
    """

    name = "leadership"

    def __init__(self, services: Iterable[str], program: str, process: UUID | None = None) -> None:
        self.services = sorted(ELECTED & set(services))
        self._program = program
        self._process = process or uuid4()
        self._told: list[str] | None = None
        self._led = {service: asyncio.Event() for service in self.services}

    async def turn(self, broker: AsyncBroker) -> float:
        identity = (socket.gethostname()[:255], os.getpid(), self._program)
        async with broker.own_connection() as conn:
            with translated():
                cursor = await conn.execute(_LEAD, [self._process, self.services, *identity])
                ((led,),) = await cursor.fetchall()
        if led != self._told:
            self._told = led
            logger.info("this process leads %s", ", ".join(led) or "no service: others do")
        for service, event in self._led.items():
            if service in led:
                event.set()
            else:
                event.clear()
        return _RENEW_EVERY_SECONDS

    async def close(self, broker: AsyncBroker) -> None:
        """Hand over the services."""
        async with broker.own_connection() as conn:
            with translated():
                await conn.execute("select pgmb.resign(%s)", [self._process])

    async def wait_for(self, service: str, stop: asyncio.Event) -> None:
        """Wait until this process leads the service, or `stop`. At once for services without a leader."""
        led = self._led.get(service)
        if led is None or led.is_set():
            return
        waiting = [asyncio.ensure_future(event.wait()) for event in (led, stop)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
