"""Routing: which handlers of a queue an event's topic calls, worked out once a topic."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from pgmb.app.delivery import Delivery
from pgmb.app.handler import Handler, Prepare, delivering, whole_event
from pgmb.app.outcome import Retry
from pgmb.app.payload import decoder
from pgmb.app.threads import Threads
from pgmb.patterns import matches
from pgmb.types import Event

CallNext: TypeAlias = Callable[[Any], Awaitable[None]]
Middleware: TypeAlias = Callable[[Any, CallNext], Awaitable[Any]]
"""Called around every delivery: `async def timing(delivery, call_next): await call_next(delivery)`."""

_TOPICS_KEPT = 10_000


class Route(NamedTuple):
    """`await call(prepare(event, hold))` handles an event."""

    prepare: Prepare
    call: Callable[[Any], Awaitable[Any]]
    timeout: float | None
    """What the caller shall see to."""
    handlers: tuple[Handler, ...]


class Routes(dict[str, Route]):
    """The routes of a queue by topic."""

    def __init__(
        self, queue: str, handlers: Sequence[Handler], middlewares: Sequence[Middleware], threads: Threads
    ) -> None:
        super().__init__()
        self.queue = queue
        self.handlers = tuple(handlers)
        self._middlewares = tuple(middlewares)
        self._threads = threads
        self.batch = self._batch() if self.handlers[0].batch else None

    def __missing__(self, topic: str) -> Route:
        if len(self) >= _TOPICS_KEPT:
            self.clear()
        found = self[topic] = self._route(topic)
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
            return Route(only.prepare, only.function, only.timeout, (only,))
        decode = matching[0].decode if len(matching) == 1 else _PLAIN
        return Route(
            delivering(decode),
            self._wrapped(lambda delivery: self._each(matching, delivery)),
            None,
            tuple(matching),
        )

    def _nowhere(self, topic: str) -> Route:
        async def refuse(event: Event) -> None:
            # Tried again and not buried: a process with newer handlers may know it.
            raise Retry(reason=f"no handler of queue {self.queue!r} matches the topic {topic!r}")

        return Route(whole_event, refuse, None, ())

    def _batch(self) -> Route:
        """The route of a queue with a batch handler, which is its only one; prepares each event alone."""
        only = self.handlers[0]
        if only.asynchronous and not self._middlewares:
            return Route(only.prepare, only.function, only.timeout, (only,))

        async def call(arguments: list[Any]) -> None:
            await self._one(only, arguments)

        return Route(only.prepare, self._wrapped(call), None, (only,))

    async def _each(self, handlers: Sequence[Handler], delivery: Delivery[Any]) -> None:
        hold = delivery.hold
        for handler in handlers:
            try:
                await self._one(handler, handler.prepare(delivery.event, hold))
            except BaseException:
                hold.blamed[delivery.event.seq] = handler
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
