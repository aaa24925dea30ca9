"""Queues at rest: one poller a process looks at all of them with one statement, ever less often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Protocol

from pgmb._async.broker import AsyncBroker
from pgmb._async.listener import AsyncListener, AsyncSubscription
from pgmb._async.receiving import AsyncLease
from pgmb._core.concurrency import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, AsyncDeadline, Pace
from pgmb.app import settling
from pgmb.app.progress import LeaseSize
from pgmb.errors import InvalidArgument, NotFound, PermissionDenied

logger = logging.getLogger("pgmb.app")


class IdleConsumer(Protocol):
    """A consumer whose queue was empty."""

    name: str
    size: LeaseSize

    def hand(self, lease: AsyncLease) -> bool:
        """Take over a lease that was received for this queue. False if the consumer is stopping."""
        ...

    def wake(self) -> None:
        """Receive for yourself again."""
        ...


class IdlePoller:
    """Looks for the first event of every queue that has none, and hands the lease to its consumer."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._waiting: dict[str, IdleConsumer] = {}
        self._news = asyncio.Event()
        self._stopping = False
        self._pace = Pace()
        self._deadline = AsyncDeadline("waiting for events", broker.break_off)

    def add(self, consumer: IdleConsumer) -> None:
        """Look for this consumer's events too, soon."""
        self._waiting[consumer.name] = consumer
        self._pace.found()
        self._news.set()

    def remove(self, consumer: IdleConsumer) -> None:
        self._waiting.pop(consumer.name, None)

    def stop(self) -> None:
        self._stopping = True
        self._news.set()

    async def run(self, listener: AsyncListener | None = None, streams: Iterable[str] = ()) -> None:
        """Until `stop`. News that the listener hears, the ticks of `pgmb serve`, are looked at at once."""
        subscriptions = [] if listener is None else [listener.subscribe(name) for name in streams]
        hearing = [asyncio.create_task(self._hear(one)) for one in subscriptions]
        try:
            while not self._stopping:
                if not self._waiting:
                    self._news.clear()
                    await self._news.wait()
                await self._pause()
                if self._waiting and not self._stopping:
                    await self._look()
        finally:
            for task in hearing:
                task.cancel()
            for subscription in subscriptions:
                subscription.close()

    async def _hear(self, subscription: AsyncSubscription) -> None:
        while not self._stopping:
            if await subscription.wait():
                self._news.set()
                # News comes by the dozen while there is traffic for others.
                await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def _pause(self) -> None:
        self._news.clear()
        if self._stopping:
            # That may have been the news.
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pace.pause()):
                await self._news.wait()

    async def _look(self) -> None:
        size = min(consumer.size.next for consumer in self._waiting.values())
        try:
            with self._deadline.enforced():
                lease = await self._broker.receive_any(list(self._waiting), size)
        except (NotFound, PermissionDenied, InvalidArgument):
            # One of them is at fault. Each finds out for itself.
            for consumer in list(self._waiting.values()):
                consumer.wake()
            self._waiting.clear()
            return
        except settling.DATABASE_ERRORS as error:
            logger.warning(
                "cannot receive: %s; retrying in %.1f s", str(error).strip(), LONGEST_PAUSE_SECONDS * 2
            )
            await asyncio.sleep(LONGEST_PAUSE_SECONDS * 2)
            return
        if not lease:
            return
        self._pace.found()
        if lease.queue not in self._waiting or not self._waiting.pop(lease.queue).hand(lease):
            with contextlib.suppress(*settling.DATABASE_ERRORS):
                await lease.release()
