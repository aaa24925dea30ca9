"""State that operations share: long polls, and the queues of leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Hashable
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Final
from uuid import UUID
from weakref import WeakValueDictionary

from starlette.requests import Request

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import NO_LEASE, AsyncLease
from pgmb._core.concurrency import LISTENING_PAUSE_SECONDS, Pace
from pgmb.errors import LeaseLost
from pgmb.server.application import Context
from pgmb.server.database import rows
from pgmb.server.limits import Places
from pgmb.server.problems import Problem
from pgmb.types import Duration

_MOST_CACHED_LEASES: Final = 10_000
_QUEUE_OF: Final = "select pgmb.queue_of(%s)"


class LeaseQueues:
    """Finds and caches the queue of a lease. Leases begin with their queue's id, which is never reused."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._names: dict[bytes, str] = {}

    async def check(self, lease: UUID, queue: str) -> None:
        """Raise LeaseLost for a lease of another queue, as for one that never existed, to reveal nothing."""
        name = self._names.get(lease.bytes[:3])
        if name is None:
            name = (await rows(self._broker, _QUEUE_OF, (lease,)))[0][0]
            if name is not None:
                if len(self._names) >= _MOST_CACHED_LEASES:
                    self._names.clear()
                self._names[lease.bytes[:3]] = name
        if name != queue:
            raise _lost(lease)


class Service:
    """The state that a running application's operations share."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.polls = LongPolls(context.broker, context.limits.long_polls)
        self.leases = LeaseQueues(context.broker)
        context.on_drain(self.polls.drain)


def _lost(lease: UUID) -> LeaseLost:
    # The same message as the database's.
    error = LeaseLost(f"lease {lease} is lost")
    error.advise(
        "It expired and its events were delivered again, or the queue was moved."
        " Roll back; extend() long work in time."
    )
    return error


def _unwatched(_: Callable[[], None]) -> AbstractContextManager[None]:
    return nullcontext()


class LongPolls:
    """Requests that wait for events, without holding a connection. Per queue, one polls at a time."""

    def __init__(self, broker: AsyncBroker, most: int) -> None:
        self._broker = broker
        self._places = Places(most)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: set[_Waiter] = set()
        self._draining = False

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    async def receive(
        self,
        request: Request,
        queue: str,
        max: int,
        wait: float,
        lease_for: Duration | None,
        watching: Callable[[Callable[[], None]], AbstractContextManager[None]] = _unwatched,
        client_id: Hashable = None,
    ) -> AsyncLease:
        """The next events of a queue.

        Returns an empty lease if none arrive in time, the client disconnects, or `watching` calls back.
        """
        ends = time.monotonic() + wait
        if wait <= 0:
            return await self._broker.receive(queue, max, lease_for)
        async with _watched(request) as waiter:
            lease = await self._broker.receive(queue, max, lease_for)
            if not (lease.events or self._draining):
                with self._place(waiter, client_id), watching(waiter.leave):
                    lease = await self._wait(waiter, queue, max, ends, lease_for)
            if lease.events and waiter.gone:
                # Nobody would settle it before it expires.
                await lease.release()
                lease.events.clear()
            return lease

    async def _wait(
        self, waiter: _Waiter, queue: str, max: int, ends: float, lease_for: Duration | None
    ) -> AsyncLease:
        source = await self._broker.stream_of(queue)
        turn = self._turns.setdefault(queue, asyncio.Lock())
        lease = AsyncLease(self._broker, "", NO_LEASE, [])
        if not await waiter.takes(turn, ends):
            return lease
        try:
            async with self._broker.listener().subscribe(source) as subscription:
                waiter.leaves.add_done_callback(lambda _: subscription.notify())
                pace = Pace()
                while not waiter.leaves.done() and (left := ends - time.monotonic()) > 0:
                    # Not cancelled midway: the lease would have no consumer until it expires.
                    lease = await self._broker.receive(queue, max, lease_for)
                    if lease.events:
                        break
                    relying = pace.at_rest and subscription.healthy
                    await subscription.wait(min(left, LISTENING_PAUSE_SECONDS if relying else pace.pause()))
        finally:
            turn.release()
        return lease

    async def drain(self) -> None:
        """End all waiting requests without events, and accept no new ones."""
        self._draining = True
        for waiter in list(self._waiting):
            waiter.leave()

    @contextmanager
    def _place(self, waiter: _Waiter, client_id: Hashable) -> Generator[None]:
        if not self._places.free(client_id):
            raise Problem(
                503, "too_many_wait", "too many requests wait for events", headers={"Retry-After": "1"}
            )
        self._waiting.add(waiter)
        try:
            with self._places.holding(client_id):
                yield
        finally:
            self._waiting.discard(waiter)


@asynccontextmanager
async def _watched(request: Request) -> AsyncGenerator[_Waiter]:
    """A request that notices when its client disconnects."""
    waiter = _Waiter()
    watching = asyncio.create_task(waiter.watch(request))
    try:
        yield waiter
    finally:
        watching.cancel()


class _Waiter:
    """One waiting request."""

    def __init__(self) -> None:
        self.leaves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = False
        """Whether the client disconnected."""

    def leave(self) -> None:
        if not self.leaves.done():
            self.leaves.set_result(None)

    async def watch(self, request: Request) -> None:
        # The body was read, so only a disconnect can follow.
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.leave()

    async def takes(self, turn: asyncio.Lock, ends: float) -> bool:
        """Wait for the turn. False if the request ends or its time is up before."""
        taking = asyncio.ensure_future(turn.acquire())
        try:
            await asyncio.wait(
                (taking, self.leaves),
                timeout=max(0, ends - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        except asyncio.CancelledError:
            if taking.done():
                turn.release()
            taking.cancel()
            raise
        if not taking.done():
            taking.cancel()
        return taking.done()
