"""Heartbeats: a worker process says every few seconds that it lives, and which connections are its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final
from uuid import uuid4

import msgspec

from pgmb._async.broker import AsyncBroker
from pgmb._core import loggers
from pgmb.app import settling
from pgmb.types import Heartbeat

logger = loggers.logger("pgmb.app")

HEARTBEAT_EVERY_SECONDS: Final = 10.0
# A worker that is silent for so long does not count as live (pgmb_internal.declarations).
SILENT_SECONDS: Final = 30.0
# The idle poller has this long to send a heartbeat with one of its polls. A busy process has no polls.
_POLLER_SECONDS: Final = 2.0
_DEPART_SECONDS: Final = 2.0


class Heartbeats:
    """One a process. At rest they travel with polls, and cost no statement of their own."""

    def __init__(
        self,
        broker: AsyncBroker,
        queues: Sequence[str],
        app: str | None = None,
        *,
        shared: bool = False,
        handled: Sequence[str] | None = None,
    ) -> None:
        """`handled`: all queues that the app has handlers of, by default those of this process."""
        self.worker = uuid4()
        self._broker = broker
        self._queues = list(queues)
        self._app = app
        self._shared = shared
        self._handled = None if handled is None else list(handled)
        self._next = time.monotonic()
        self._reached = time.monotonic()
        """When the last one was sent that reached the database."""
        self._back: list[Callable[[], None]] = []

    def when_back(self, tell: Callable[[], None]) -> None:
        """Call `tell` when a heartbeat arrives after so long that this worker did not count as live."""
        self._back.append(tell)

    def due(self) -> Heartbeat | None:
        """The heartbeat to send now, if it is time."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + HEARTBEAT_EVERY_SECONDS
        return Heartbeat(
            self.worker,
            socket.gethostname()[:255],
            os.getpid(),
            self._queues,
            self._broker.backends(),
            self._app,
            self._shared,
            self._handled,
        )

    def arrived(self, sent: float) -> None:
        """The database has one that was sent at that time of the monotonic clock."""
        # Answers are late, not early: the database counts no silence that is longer than this.
        silent = time.monotonic() - self._reached > SILENT_SECONDS
        self._reached = max(self._reached, sent)
        if silent:
            logger.info("the database had not heard of this worker for a while: declaring again")
            for tell in self._back:
                tell()

    async def begin(self) -> None:
        """Send the first one: a worker declares its queues after it has said that it lives."""
        await self._send()
        # The next one names connections that are opened only then.
        self._next = time.monotonic()

    async def run(self) -> None:
        """Send those that no poll has sent, until cancelled."""
        while True:
            await asyncio.sleep(self._next + _POLLER_SECONDS - time.monotonic())
            if time.monotonic() < self._next + _POLLER_SECONDS:
                continue
            try:
                await self._send()
            except settling.DATABASE_ERRORS as error:
                logger.warning("cannot send a heartbeat: %s", str(error).strip())

    async def _send(self) -> None:
        sent = time.monotonic()
        heartbeat = self.due()
        if heartbeat is not None:
            await self._broker.worker_heartbeat(*msgspec.structs.astuple(heartbeat))
            self.arrived(sent)

    async def depart(self) -> None:
        """Say that this process stops. A database that is down must not hold it up."""
        with contextlib.suppress(TimeoutError, *settling.DATABASE_ERRORS):
            async with asyncio.timeout(_DEPART_SECONDS):
                await self._broker.worker_depart(self.worker)
