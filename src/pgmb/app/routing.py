"""Routing: which handlers of a queue an event's topic calls, worked out once a topic."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from pgmb._core import loggers
from pgmb._core.patterns import matches
from pgmb.app.delivery import Delivery
from pgmb.app.handler import Handler, Prepare, delivering, whole_event
from pgmb.app.outcome import Late, Unfit, Unhandled, describe, trace
from pgmb.app.payload import decoder
from pgmb.app.progress import Failure, LeaseProgress, chains, parts
from pgmb.app.threads import Threads
from pgmb.types import Event, copy, live

logger = loggers.logger("pgmb.app")

DEFAULT_UNHANDLED_SECONDS = 86_400.0
"""How long an event that no worker can handle waits for one, before it becomes a dead letter."""

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
        self,
        queue: str,
        handlers: Sequence[Handler],
        middlewares: Sequence[Middleware],
        threads: Threads,
        unhandled_for: float = DEFAULT_UNHANDLED_SECONDS,
    ) -> None:
        super().__init__()
        self.queue = queue
        self.unhandled_for = unhandled_for
        self.handlers = tuple(handlers)
        self._middlewares = tuple(middlewares)
        self._threads = threads
        self.batch = self._batch() if self.handlers[0].batch else None
        self.size = self.handlers[0].batch or 1
        """How many events a call takes."""
        self._details: dict[str, Route] = {}

    def __missing__(self, topic: str) -> Way:
        found = self[topic] = self.details(topic).way
        return found

    def details(self, topic: str) -> Route:
        found = self._details.get(topic)
        if found is None:
            if len(self._details) >= _CACHED_TOPICS:
                self.clear()
                self._details.clear()
            found = self._details[topic] = self._route(topic)
        return found

    def refuse_unmatched(self, progress: LeaseProgress) -> dict[int, Unhandled]:
        """Fail a lease's events that the batch handler does not match, so that no batch has them. By seq."""
        refused: dict[int, Unhandled] = {}
        if self.batch is None:
            return refused
        for event in live(progress.lease.events):
            if event.seq not in progress.behind and not self.details(event.topic).handlers:
                refused[event.seq] = error = Unhandled(self._unmatched(event.topic))
                progress.failed[event.seq] = self.failure(progress, event, error)
                progress.hold_back_behind(event)
        if refused:
            progress.drop_refused()
        return refused

    def divide(self, progress: LeaseProgress) -> None:
        """Divide a lease's events into what calls take. Raises what `split_by` raises, and SplitError."""
        only = self.handlers[0]
        if only.together:
            progress.divide(lambda events: parts(events, only.split_by))
        elif progress.ordered:
            progress.divide(chains)

    def failure(self, progress: LeaseProgress, event: Event, error: BaseException) -> Failure:
        """What becomes of an event that was not handled."""
        if isinstance(error, Unhandled):
            return Failure(False, None, describe(error), unhandled_for=self.unhandled_for)
        handler = self.blamed(progress, event)
        if handler is None:
            return Failure(False, None, describe(error), detail=trace(error))
        failure = handler.failure(event, error)
        return failure._replace(unhandled_for=self.unhandled_for) if isinstance(error, Unfit) else failure

    def blamed(self, progress: LeaseProgress, event: Event) -> Handler | None:
        """The handler that raised, as far as it is known."""
        blamed = progress.blamed.get(event.seq)
        return blamed if isinstance(blamed, Handler) else next(iter(self.details(event.topic).handlers), None)

    def _route(self, topic: str) -> Route:
        matching = [
            handler
            for handler in self.handlers
            if any(matches(pattern, topic) for pattern in handler.patterns)
        ]
        if not matching:
            return self._nowhere(topic)
        if self.batch is not None:
            return self.batch
        plain = matching[0].asynchronous and matching[0].respond is None
        if len(matching) == 1 and plain and not self._middlewares:
            only = matching[0]
            return Route((only,), only.timeout, (only.prepare, only.function))
        decode = matching[0].decode if len(matching) == 1 else _PLAIN
        call = self._wrapped(partial(self._each, matching))
        return Route(tuple(matching), None, (delivering(decode), call))

    def _nowhere(self, topic: str) -> Route:
        reason = self._unmatched(topic)
        # Once a topic and process, because each event comes again and again.
        logger.warning("%s here; its events are released for other workers", reason)

        async def refuse(event: Event) -> None:
            raise Unhandled(reason)

        return Route((), None, (whole_event, refuse))

    def _unmatched(self, topic: str) -> str:
        return f"no handler of queue {self.queue!r} matches the topic {topic!r}"

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
        event, progress = delivery.event, delivery.progress
        blamed = handlers[0]
        try:
            arguments: list[Any] = []
            # All of them before the first call: an event that is released for other workers comes again and
            # again, and each time the handlers that it fits would run.
            for number, blamed in enumerate(handlers):
                try:
                    # Each decodes for itself: what one changes in a payload is nothing to the next.
                    own = event if number == 0 else copy(event)
                    arguments.append(blamed.prepare(own, progress))
                except BaseException as error:
                    if blamed.respond is None:
                        raise
                    await blamed.respond(delivery, partial(_raise, error))
                    return
            for blamed, argument in zip(handlers, arguments, strict=True):
                if blamed.respond is None:
                    await self._one(blamed, argument)
                else:
                    await blamed.respond(delivery, partial(self._one, blamed, argument))
        except BaseException:
            progress.blamed[event.seq] = blamed
            raise

    async def _one(self, handler: Handler, argument: Any) -> Any:
        """Call a handler. Returns what it returns."""
        began = time.monotonic()
        if handler.asynchronous:
            result = handler.function(argument)
        else:
            with _warned(handler):
                result = await self._threads.run(lambda: handler.function(argument))
        if inspect.isawaitable(result):
            result = await _limited(handler, result, began)
        elif handler.timeout is not None and time.monotonic() - began >= handler.timeout:
            raise Late(handler.timeout)
        return result

    def _wrapped(self, call: CallNext) -> CallNext:
        for middleware in reversed(self._middlewares):
            call = _around(middleware, call)
        return call


async def _limited(handler: Handler, result: Awaitable[Any], began: float) -> Any:
    if handler.timeout is None:
        return await result
    limit = asyncio.timeout(began + handler.timeout - time.monotonic())
    try:
        async with limit:
            return await result
    except TimeoutError:
        if limit.expired():
            raise Late(handler.timeout) from None
        raise


@contextlib.contextmanager
def _warned(handler: Handler) -> Generator[None]:
    """Say when a function in a thread is late: it cannot be broken off, and fails once it has ended."""
    if handler.timeout is None:
        yield
        return
    said = "%s is not done within %g s; its thread cannot be stopped and keeps its place and its event"
    timer = asyncio.get_running_loop().call_later(
        handler.timeout, logger.warning, said, handler.name, handler.timeout
    )
    try:
        yield
    finally:
        timer.cancel()


def _around(middleware: Middleware, call_next: CallNext) -> CallNext:
    async def call(delivery: Any) -> None:
        await middleware(delivery, call_next)

    return call


async def _raise(error: BaseException) -> None:
    raise error


_PLAIN = decoder(Any)
