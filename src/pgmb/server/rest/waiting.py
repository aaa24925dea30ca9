"""Long polls: requests that wait for events of a queue, without a connection to the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from weakref import WeakValueDictionary

from starlette.requests import Request

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import NO_LEASE, AsyncLease
from pgmb._core.concurrency import LISTENING_PAUSE_SECONDS, Pace
from pgmb.server.problems import Problem
from pgmb.types import Duration


def _unwatched(_: Callable[[], None]) -> AbstractContextManager[None]:
    return nullcontext()


class LongPolls:
    """The requests of this process that wait. Those of one queue take turns: one of them looks for all."""

    def __init__(self, broker: AsyncBroker, most: int) -> None:
        self._broker = broker
        self._most = most
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: set[_Waiter] = set()
        self._draining = False

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return len(self._waiting)

    async def receive(
        self,
        request: Request,
        queue: str,
        max: int,
        wait: float,
        lease_for: Duration | None,
        watching: Callable[[Callable[[], None]], AbstractContextManager[None]] = _unwatched,
    ) -> AsyncLease:
        """The next events of a queue; an empty lease if none come in time, the client goes away, or what
        `watching` watches is taken back.
        """
        ends = time.monotonic() + wait
        lease = await self._broker.receive(queue, max, lease_for)
        if lease.events or wait <= 0 or self._draining:
            return lease
        async with self._place(request) as waiter:
            with watching(waiter.leave):
                return await self._wait(waiter, queue, max, ends, lease_for)

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
                    # Never cut short: its lease would be nobody's until it expires.
                    lease = await self._broker.receive(queue, max, lease_for)
                    if lease.events:
                        break
                    relying = pace.at_rest and subscription.healthy
                    await subscription.wait(min(left, LISTENING_PAUSE_SECONDS if relying else pace.pause()))
        finally:
            turn.release()
        if lease.events and waiter.gone:
            await lease.release()
        return lease

    async def drain(self) -> None:
        """Send those who wait away, with nothing. Nobody waits from now on."""
        self._draining = True
        for waiter in list(self._waiting):
            waiter.leave()

    @asynccontextmanager
    async def _place(self, request: Request) -> AsyncGenerator[_Waiter]:
        if len(self._waiting) >= self._most:
            raise Problem(
                503, "too_many_wait", "too many requests wait for events", headers={"Retry-After": "1"}
            )
        waiter = _Waiter()
        self._waiting.add(waiter)
        watching = asyncio.create_task(waiter.watch(request))
        try:
            yield waiter
        finally:
            watching.cancel()
            self._waiting.discard(waiter)


class _Waiter:
    """One request that waits."""

    def __init__(self) -> None:
        self.leaves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = False
        """Whether its client is."""

    def leave(self) -> None:
        if not self.leaves.done():
            self.leaves.set_result(None)

    async def watch(self, request: Request) -> None:
        # The body was read: all that can come is the end.
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.leave()

    async def takes(self, turn: asyncio.Lock, ends: float) -> bool:
        """Whether its turn comes before it leaves, or its time is over."""
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
