"""Consuming a queue in a loop of one's own."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pgmb._async.listener import AsyncListener, AsyncListening, AsyncSubscription
from pgmb._async.receiving import AsyncLease, AsyncReceiving
from pgmb._core import statements
from pgmb._core.concurrency import LISTENING_PAUSE_SECONDS, Pace
from pgmb.errors import InvalidArgument
from pgmb.types import Duration


class AsyncLeases:
    """The leases of a queue, one after another, none of them empty. Made by `consume`.

    It settles nothing: ack each lease before you ask for the next. It goes on until `close`.
    """

    def __init__(
        self, broker: AsyncConsuming, queue: str, max: int, lease_for: Duration | None, listen: bool
    ) -> None:
        self._broker = broker
        self.queue = queue
        self._max = max
        self._lease_for = lease_for
        self._listener = broker.listener() if listen else AsyncListener(pooled=True)
        self._subscription: AsyncSubscription | None = None
        self._pace = Pace()
        self._closed = False

    def close(self) -> None:
        """End the iteration, also while a caller waits for the next lease."""
        self._closed = True
        if self._subscription is not None:
            self._subscription.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncLease:
        if self._subscription is None:
            self._subscription = self._listener.subscribe(await self._broker.stream_of(self.queue))
        while not self._closed:
            lease = await self._broker.receive(self.queue, self._max, self._lease_for)
            if lease.events:
                self._pace.found()
                return lease
            relying = self._pace.at_rest and self._subscription.healthy
            await self._subscription.wait(LISTENING_PAUSE_SECONDS if relying else self._pace.pause())
        raise StopAsyncIteration


class AsyncConsuming(AsyncReceiving, AsyncListening):
    def consume(
        self, queue: str, max: int = 100, lease_for: Duration | None = None, *, listen: bool = True
    ) -> AsyncLeases:
        """Receive from a queue again and again, and wait while it is empty: an iterator of leases.

        It looks in growing intervals, from 5 ms to half a second. With `listen` the broker's listener wakes
        it, and it looks by itself once a second.
        """
        if max < 1:
            raise InvalidArgument(f"max must be at least 1, got {max}")
        return AsyncLeases(self, queue, max, lease_for, listen)

    async def stream_of(self, queue: str) -> str:
        """The stream that a queue reads."""
        return str(await self._value(statements.stream_of(queue), None))
