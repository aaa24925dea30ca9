"""Routing: which handlers of a queue an event's topic calls, worked out once a topic."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from pgmb._core.patterns import matches
from pgmb.app.delivery import Delivery
from pgmb.app.handler import Handler, Prepare, delivering, whole_event
from pgmb.app.outcome import Retry
from pgmb.app.payload import decoder
from pgmb.app.progress import LeaseProgress
from pgmb.app.threads import Threads
from pgmb.types import Event

CallNext: TypeAlias = Callable[[Any], Awaitable[None]]
Middleware: TypeAlias = Callable[[Any, CallNext], Awaitable[Any]]
"""Called around every delivery: `async def timing(delivery, call_next): await call_next(delivery)`."""

Way: TypeAlias = tuple[Prepare, Callable[[Any], Awaitable[Any]]]
"""(prepare, call): `await call(prepare(event, progress))` handles an event. Tuples unpack fastest."""

_CACHED_TOPICS = 10_000


class Route(NamedTuple):
    """Where a topic leads."""

    handlers: tuple[Handler, ...]
    timeout: float | None
    """The timeout that the caller must enforce."""
    way: Way


class Routes(dict[str, Way]):
    """The ways of a queue's events by topic; `details` knows more of them."""

    def __init__(
        self, queue: str, handlers: Sequence[Handler], middlewares: Sequence[Middleware], threads: Threads
    ) -> None:
        super().__init__()
        self.queue = queue
        self.handlers = tuple(handlers)
        self._middlewares = tuple(middlewares)
        self._threads = threads
        self.batch = self._batch() if self.handlers[0].batch else None
        self.size = self.handlers[0].batch or 1
        """How many events a call takes."""
        self._details: dict[str, Route] = {}

    def __missing__(self, topic: str) -> Way:
        if len(self) >= _CACHED_TOPICS:
            self.clear()
            self._details.clear()
        found = self[topic] = self.details(topic).way
        return found

    def details(self, topic: str) -> Route:
        if self.batch is not None:
            return self.batch
        found = self._details.get(topic)
        if found is None:
            found = self._details[topic] = self._route(topic)
        return found

    def _route(self, topic: str) -> Route:
        matching = [
            handler
            for handler in self.handlers
            if any(matches(pattern, topic) for pattern in handler.patterns)
        ]
        if not matching:
            return self._nowhere(topic)
        if len(matching) == 1 and matching[0].asynchronous and not self._middlewares:
            only = matching[0]
            return Route((only,), only.timeout, (only.prepare, only.function))
        decode = matching[0].decode if len(matching) == 1 else _PLAIN
        call = self._wrapped(lambda delivery: self._each(matching, delivery))
        return Route(tuple(matching), None, (delivering(decode), call))

    def _nowhere(self, topic: str) -> Route:
        async def refuse(event: Event) -> None:
            # Tried again and not buried: a process with newer handlers may know it.
            raise Retry(reason=f"no handler of queue {self.queue!r} matches the topic {topic!r}")

        return Route((), None, (whole_event, refuse))

    def _batch(self) -> Route:
        """The route of a queue with a batch handler, which is its only one; prepares each event alone."""
        only = self.handlers[0]
        if only.asynchronous and not self._middlewares:
            return Route((only,), only.timeout, (only.prepare, only.function))

        def prepare(event: Event, progress: LeaseProgress) -> Delivery[Any]:
            delivery = Delivery[Any](only.decode, event, progress)
            # What does not fit is rejected here, alone.
            only.take(delivery)
            return delivery

        async def call(deliveries: list[Delivery[Any]]) -> None:
            await self._one(only, [only.take(delivery) for delivery in deliveries])

        return Route((only,), None, (prepare, self._wrapped(call)))

    async def _each(self, handlers: Sequence[Handler], delivery: Delivery[Any]) -> None:
        progress = delivery.progress
        for handler in handlers:
            try:
                await self._one(handler, handler.prepare(delivery.event, progress))
            except BaseException:
                progress.blamed[delivery.event.seq] = handler
                raise

    async def _one(self, handler: Handler, argument: Any) -> None:
        if handler.timeout is None:
            await self._call(handler, argument)
            return
        limit = asyncio.timeout(handler.timeout)
        try:
            async with limit:
                await self._call(handler, argument)
        except TimeoutError:
            if limit.expired():
                raise late(handler.timeout) from None
            raise

    async def _call(self, handler: Handler, argument: Any) -> None:
        if handler.asynchronous:
            await handler.function(argument)
            return
        result = await self._threads.run(lambda: handler.function(argument))
        if inspect.isawaitable(result):
            await result

    def _wrapped(self, call: CallNext) -> CallNext:
        for middleware in reversed(self._middlewares):
            call = _around(middleware, call)
        return call


def _around(middleware: Middleware, call_next: CallNext) -> CallNext:
    async def call(delivery: Any) -> None:
        await middleware(delivery, call_next)

    return call


def late(timeout: float) -> TimeoutError:
    return TimeoutError(f"not done within {timeout:g} s")


_PLAIN = decoder(Any)
