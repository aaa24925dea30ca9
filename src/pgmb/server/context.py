"""What the parts of the server share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from pgmb._async.broker import AsyncBroker
from pgmb.server.access import Access
from pgmb.server.limits import Limits, Rates


class Context:
    """One for each application that runs, made when it starts."""

    def __init__(self, broker: AsyncBroker, limits: Limits, closing: AsyncExitStack) -> None:
        self.broker = broker
        self.limits = limits
        self.access = Access(broker)
        self.rates = Rates(limits.requests_per_second, limits.burst)
        self._closing = closing

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Has something ended with the application, the last one first."""
        self._closing.push_async_callback(close)
