"""News of streams, so that a dispatcher at rest need not look often."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgmb._async.broker import AsyncBroker
    from pgmb._async.listener import AsyncSubscription


class Wakeups:
    """Hears of the streams that it follows, and sets `news`."""

    def __init__(self, news: asyncio.Event) -> None:
        self._news = news
        self._subscriptions: dict[str, AsyncSubscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._heard: set[str] = set()
        self._closing = False

    def follow(self, broker: AsyncBroker, streams: Iterable[str]) -> None:
        """Hear of these streams from now on."""
        if self._closing:
            return
        for stream in set(streams) - self._subscriptions.keys():
            subscription = self._subscriptions[stream] = broker.listener().subscribe(stream)
            self._tasks[stream] = asyncio.create_task(self._hear(stream, subscription))

    def relies_on(self, stream: str) -> bool:
        """Whether news of a stream is sure to be heard."""
        subscription = self._subscriptions.get(stream)
        return subscription is not None and subscription.healthy

    def heard(self) -> set[str]:
        """The streams that there was news of since the last time."""
        heard, self._heard = self._heard, set()
        return heard

    async def close(self) -> None:
        """Hear no more."""
        self._closing = True
        for subscription in self._subscriptions.values():
            # Wakes whoever waits for it.
            subscription.close()
        await asyncio.gather(*self._tasks.values())

    async def _hear(self, stream: str, subscription: AsyncSubscription) -> None:
        while await subscription.wait() and not self._closing:
            self._heard.add(stream)
            self._news.set()
