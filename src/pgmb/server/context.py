"""What the parts of the server share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from pgmb._async.broker import AsyncBroker
from pgmb.server.access import Access
from pgmb.server.counts import Counts
from pgmb.server.limits import Limits, Rates

WAY_OUT: Final = "pgmb.send"
"""In the scope: what the host gave to send by. Bodies of many parts go that way, past what we put around."""


class Context:
    """One for each application that runs, made when it starts."""

    def __init__(self, broker: AsyncBroker, limits: Limits, closing: AsyncExitStack) -> None:
        self.broker = broker
        self.limits = limits
        self.access = Access(broker)
        closing.push_async_callback(self.access.close)
        self.rates = Rates(limits.requests_per_second, limits.burst)
        self.counts = Counts()
        self.draining = False
        """Whether the process is about to end: nobody new is to come here."""
        self._closing = closing
        self._drains: list[Callable[[], Awaitable[None]]] = []

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Has something ended with the application, the last one first."""
        self._closing.push_async_callback(close)

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Has something called when the process is about to end: whoever stays long is sent away."""
        self._drains.append(drain)

    async def drain(self) -> None:
        """No longer ready, and whoever stays for long is told to go. May be called again."""
        if not self.draining:
            self.draining = True
            for drain in self._drains:
                await drain()
