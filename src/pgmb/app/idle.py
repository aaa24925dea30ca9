"""Queues at rest: one poller a process looks at all of them with one statement, ever less often."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import psycopg

from pgmb._async.broker import AsyncBroker
from pgmb._async.listener import AsyncSubscription
from pgmb._async.receiving import AsyncLease
from pgmb._core import loggers
from pgmb._core.batch_limit import is_lost_connection
from pgmb._core.concurrency import (
    FIRST_PAUSE_SECONDS,
    LISTENING_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    AsyncDeadline,
    Pace,
)
from pgmb.app import settling
from pgmb.app.heartbeats import Heartbeats
from pgmb.app.kept import kept
from pgmb.app.progress import LeaseSize
from pgmb.errors import InvalidArgument, NotFound, PermissionDenied, QueueHeld

logger = loggers.logger("pgmb.app")


class IdleConsumer(Protocol):
    """A consumer whose queue was empty."""

    name: str
    size: LeaseSize

    def hand(self, lease: AsyncLease, full: bool) -> bool:
        """Take over a lease that was received for this queue. False if the consumer is stopping."""
        ...

    def wake(self) -> None:
        """Receive for yourself again."""
        ...


class IdlePoller:
    """Looks for the first event of every queue that has none, and hands the lease to its consumer."""

    def __init__(self, broker: AsyncBroker, heartbeats: Heartbeats) -> None:
        self._broker = broker
        self._heartbeats = heartbeats
        self._waiting: dict[str, IdleConsumer] = {}
        self._told: set[str] = set()
        """Queues with news since they were last polled, also those whose consumers are busy."""
        self._news = asyncio.Event()
        self._stopping = False
        self._pace = Pace()
        self._retrying = Pace(settling.FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS * 2)
        self._polled_at = float("-inf")
        """When all waiting queues were polled last."""
        self._deadline = AsyncDeadline("waiting for events", broker.break_off)
        self._subscriptions: list[AsyncSubscription] = []

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

    async def run(self, subscriptions: Mapping[str, AsyncSubscription] | None = None) -> None:
        """Run until `stop`. A queue with news, from the ticks of `pgmb serve`, is polled at once."""
        heard = dict(subscriptions or {})
        self._subscriptions = list(heard.values())
        hearing = [
            asyncio.create_task(kept(f"listening for queue {queue}", partial(self._hear, queue, one)))
            for queue, one in heard.items()
        ]
        try:
            await kept("polling queues at rest", self._poll)
        finally:
            for task in hearing:
                task.cancel()
            for subscription in self._subscriptions:
                subscription.close()

    async def _poll(self) -> None:
        while not self._stopping:
            if not self._waiting:
                self._news.clear()
                await self._news.wait()
            queues = await self._pause()
            if queues and not self._stopping:
                await self._look(queues)

    async def _hear(self, queue: str, subscription: AsyncSubscription) -> None:
        while not self._stopping:
            if await subscription.wait():
                self._told.add(queue)
                self._news.set()
                # News comes by the dozen while there is traffic for others.
                await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def _pause(self) -> list[str]:
        """Wait until it is time to poll. Returns the queues to poll: those with news, or all."""
        relying = self._relying
        # Counted from the last poll of all queues: retries and expired leases are not announced.
        end = self._polled_at + (LISTENING_PAUSE_SECONDS if relying else self._pace.pause())
        while not self._stopping and time.monotonic() < end:
            if told := self._told & self._waiting.keys():
                # Removed before the poll: news that arrives during it counts for the next one.
                self._told -= told
                return list(told)
            self._news.clear()
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                break
            if not relying and not self._told:
                # A queue was added.
                break
        self._told -= self._waiting.keys()
        self._polled_at = time.monotonic()
        return list(self._waiting)

    @property
    def _relying(self) -> bool:
        """Whether another process announces new events: polls then find retries and expired leases."""
        return bool(self._subscriptions) and all(one.announced for one in self._subscriptions)

    async def _look(self, queues: list[str]) -> None:
        size = min(self._waiting[queue].size.next for queue in queues)
        heartbeat = self._heartbeats.due()
        sent = time.monotonic()
        try:
            with self._deadline.enforced():
                if len(queues) == 1 and heartbeat is None:
                    # The usual case after news; it saves a nested call in the database.
                    lease = await self._broker.receive(queues[0], size)
                else:
                    lease = await self._broker.receive_any(queues, size, heartbeat=heartbeat)
        except (NotFound, PermissionDenied, InvalidArgument, QueueHeld):
            # One of them is at fault. Each finds out for itself.
            for consumer in list(self._waiting.values()):
                consumer.wake()
            self._waiting.clear()
            return
        except settling.DATABASE_ERRORS as error:
            if isinstance(error, psycopg.Error) and not is_lost_connection(error):
                # One of them is at fault, or has an event that cannot be read.
                for queue in queues:
                    if queue in self._waiting:
                        self._waiting.pop(queue).wake()
                return
            pause = self._retrying.pause()
            logger.warning("cannot receive: %s; retrying in %.1f s", str(error).strip(), pause)
            # The news that led to this poll is still unread.
            self._told.update(queues)
            await asyncio.sleep(pause)
            return
        self._retrying.found()
        if heartbeat is not None:
            self._heartbeats.arrived(sent)
        if not lease:
            return
        self._pace.found()
        # Some of the others were not polled; the order is the database's.
        self._told.update(queue for queue in queues if queue != lease.queue)
        full = len(lease.events) >= size
        if lease.queue not in self._waiting or not self._waiting.pop(lease.queue).hand(lease, full):
            with contextlib.suppress(*settling.DATABASE_ERRORS):
                await lease.release()
