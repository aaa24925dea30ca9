"""Long polls: requests that wait for events of a queue, without a connection to the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from starlette.requests import Request

from pgmb._async.broker import AsyncBroker
from pgmb._async.lease import AsyncLease
from pgmb._async.listener import AsyncSubscription
from pgmb.polling import RELYING_PAUSE, Pace
from pgmb.server.problems import Problem
from pgmb.types import Duration


class LongPolls:
    """The requests of this process that wait. Those of one queue take turns: one of them looks for all."""

    def __init__(self, broker: AsyncBroker, most: int) -> None:
        self._broker = broker
        self._most = most
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.waiting = 0

    async def receive(
        self, request: Request, queue: str, max: int, wait: float, lease_for: Duration | None
    ) -> AsyncLease:
        """The next events of a queue; an empty lease if none come in time, or the client goes away."""
        lease = await self._broker.receive(queue, max, lease_for)
        if lease.events or wait <= 0:
            return lease
        ends = time.monotonic() + wait
        with self._place():
            source = await self._broker.stream_of(queue)
            async with self._broker.listener().subscribe(source) as subscription:
                gone = asyncio.create_task(_disconnected(request, subscription))
                try:
                    # A look is never cut short: its lease would be nobody's until it expires.
                    async with _Turn(self._turns.setdefault(queue, asyncio.Lock()), gone, ends) as turn:
                        pace = Pace()
                        while turn.has and not gone.done() and (left := ends - time.monotonic()) > 0:
                            lease = await self._broker.receive(queue, max, lease_for)
                            if lease.events:
                                break
                            relying = pace.at_rest and subscription.healthy
                            await subscription.wait(min(left, RELYING_PAUSE if relying else pace.pause()))
                    if gone.done() and lease.events:
                        await lease.release()
                finally:
                    gone.cancel()
        return lease

    @contextmanager
    def _place(self) -> Generator[None]:
        if self.waiting >= self._most:
            raise Problem(
                503, "too_many_wait", "too many requests wait for events", headers={"Retry-After": "1"}
            )
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


class _Turn:
    """A lock that is waited for until a time, or until somebody is gone: `has` says whether it was got."""

    def __init__(self, lock: asyncio.Lock, gone: asyncio.Task[None], ends: float) -> None:
        self._lock = lock
        self._gone = gone
        self._ends = ends
        self.has = False

    async def __aenter__(self) -> _Turn:
        taking = asyncio.create_task(self._lock.acquire())
        try:
            await asyncio.wait(
                {taking, self._gone},
                timeout=self._ends - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if taking.done():
                self.has = True
            else:
                taking.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.has:
            self._lock.release()


async def _disconnected(request: Request, subscription: AsyncSubscription) -> None:
    # The body was read: all that can come is the end.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    subscription.notify()
