"""Running handlers over all that is deliverable, here and now, and ending when nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._async.receiving import AsyncLease
from pgmb.app import App
from pgmb.app.declaring import Declarations, QueueSettings, QueueSpec
from pgmb.app.handler import Handler
from pgmb.app.handling import Handled, handle_lease, meant
from pgmb.app.routing import DEFAULT_UNHANDLED_SECONDS, Routes
from pgmb.app.threads import Threads
from pgmb.errors import InvalidArgument, QueueNotFound
from pgmb.testing.clock import FrozenClock, frozen_in
from pgmb.testing.source import Source, dsn_of

Handlers: TypeAlias = App | Callable[[Any], Any] | Iterable[Callable[[Any], Any]]


class Drained(msgspec.Struct, frozen=True):
    """What `drain` did, delivery by delivery."""

    deliveries: list[Handled]

    @property
    def handled(self) -> int:
        """How many deliveries went well."""
        return self._count("done")

    @property
    def retried(self) -> int:
        """How many failed and are to be tried again."""
        return self._count("retried")

    @property
    def buried(self) -> int:
        """How many became dead letters."""
        return self._count("buried")

    @property
    def released(self) -> int:
        """How many no handler took: they wait for a worker that runs other code."""
        return self._count("released")

    @property
    def errors(self) -> list[BaseException]:
        """What handlers raised, but for Retry and Reject, which are meant."""
        return [one.error for one in self.deliveries if one.error is not None and not meant(one.error)]

    def _count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.deliveries)

    def __repr__(self) -> str:
        counts = f"handled={self.handled}, retried={self.retried}, buried={self.buried}"
        return f"Drained({counts}{f', released={self.released}' if self.released else ''})"


def drain(
    handlers: Handlers,
    queue: str | None = None,
    *,
    broker: Source | None = None,
    raises: bool = False,
    limit: int = 10_000,
) -> Drained:
    """Run an app's handlers, or functions, over everything that can be delivered, until there is nothing.

    One delivery after another, in this thread. Of an app all queues are drained, or the one named; queues
    that do not exist are created and begin with the stream's first event. Functions take what is in `queue`.
    The database is the app's, or that of `broker`. Failures are settled as they would be; with `raises` the
    first that was not meant is raised then. Deliveries beyond `limit` are an error: handlers that feed
    themselves never end.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_drain_and_close(handlers, queue, broker, raises, limit))
    raise RuntimeError("drain() was called inside an event loop; await adrain() there")


async def _drain_and_close(
    handlers: Handlers, queue: str | None, broker: Source | None, raises: bool, limit: int
) -> Drained:
    try:
        return await adrain(handlers, queue, broker=broker, raises=raises, limit=limit)
    finally:
        if isinstance(handlers, App):
            # What handlers opened in this event loop ends with it.
            await handlers.aclose()


async def adrain(
    handlers: Handlers,
    queue: str | None = None,
    *,
    broker: Source | None = None,
    raises: bool = False,
    limit: int = 10_000,
) -> Drained:
    """`drain` inside an event loop."""
    source = broker if broker is not None else handlers if isinstance(handlers, App) else None
    if source is None:
        raise InvalidArgument("to drain functions, pass broker=...")
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(source, AsyncBroker):
            connected = source
        else:
            connected = await stack.enter_async_context(await aconnect(dsn_of(source), max_size=4))
        if isinstance(handlers, App) and handlers.lifespan is not None:
            await stack.enter_async_context(handlers.lifespan(handlers))
        queues = await _queues(connected, handlers, queue)
        async with connected.own_connection() as conn:
            clock = frozen_in(conn)
        if isinstance(handlers, App) and clock is not None:
            await _schedule(connected, handlers, clock)
        return await _Draining(connected, queues, clock, raises, limit).run()


class _Queue(NamedTuple):
    routes: Routes
    stream: str
    settings: QueueSettings
    run_other_code: Callable[[str], Awaitable[bool]]


async def _queues(broker: AsyncBroker, handlers: Handlers, queue: str | None) -> list[_Queue]:
    if isinstance(handlers, App):
        declared = [one for one in handlers.queues.values() if one.handlers and queue in (None, one.name)]
        middlewares, unhandled_for = handlers.middlewares, handlers.unhandled_for
        for one in declared:
            await _create(broker, one)
    else:
        functions = [handlers] if callable(handlers) else list(handlers)
        declared = [await _standing(broker, queue, functions)] if functions else []
        middlewares, unhandled_for = [], DEFAULT_UNHANDLED_SECONDS
    if not declared:
        raise InvalidArgument("no handlers" if queue is None else f"no handlers of queue {queue!r}")
    declarations = Declarations(broker)
    found = await declarations.declare(declared)
    here = _Here("")
    return [
        _Queue(
            Routes(one.name, one.handlers, middlewares, here, unhandled_for),
            one.stream,
            found[one.name],
            declarations.run_other_code,
        )
        for one in declared
    ]


async def _schedule(broker: AsyncBroker, app: App, clock: FrozenClock) -> None:
    """Create the app's schedules that are not there yet; the clock says when they are due."""
    present = {schedule.name for schedule in await broker.schedules()}
    for name, settings in app.schedules.items():
        if name not in present:
            await broker.create_schedule(name, **settings)
            clock.hold()


async def _create(broker: AsyncBroker, queue: QueueSpec) -> None:
    """Create a queue that is not there, such that it sees what the test has published before."""
    try:
        await broker.stream_of(queue.name)
    except QueueNotFound:
        await broker.create_stream(queue.stream)
        await queue.acreate(broker, queue.settings.get("starting") or await broker.earliest(queue.stream))


async def _standing(
    broker: AsyncBroker, queue: str | None, functions: Iterable[Callable[[Any], Any]]
) -> QueueSpec:
    """The queue as it is, with handlers of everything in it."""
    if queue is None:
        raise InvalidArgument("to drain functions, pass queue=...")
    for status in await broker.queue_status():
        if status.queue == queue:
            declared = QueueSpec(queue)
            declared.set({"stream": status.stream})
            for function in functions:
                declared.add(Handler(function, status.patterns))
            return declared
    raise QueueNotFound(f"queue {queue!r} does not exist")


class _Here(Threads):
    """Runs functions in the caller's thread, which may hold a transaction that they are to be part of."""

    async def run(self, function: Callable[[], Any]) -> Any:
        return function()


class _Draining:
    def __init__(
        self,
        broker: AsyncBroker,
        queues: list[_Queue],
        clock: FrozenClock | None,
        raises: bool,
        limit: int,
    ) -> None:
        self._broker = broker
        self._queues = queues
        self._clock = clock
        self._raises = raises
        self._limit = limit
        self._deliveries: list[Handled] = []

    async def run(self) -> Drained:
        looks = 0
        while looks < 2:
            if looks == 1:
                await self._release()
            looks = 0 if await self._look() else looks + 1
        if self._clock is not None:
            self._clock.hold()
        return Drained(self._deliveries)

    async def _look(self) -> bool:
        """Handle what there is, of each queue until it is empty. True if there was anything."""
        before = len(self._deliveries)
        for queue in self._queues:
            while lease := await self._receive(queue):
                await self._handle(queue, lease)
        return len(self._deliveries) > before

    async def _receive(self, queue: _Queue) -> AsyncLease:
        if self._clock is not None:
            self._clock.hold_if_stale()
        if len(self._deliveries) >= self._limit:
            raise RuntimeError(
                f"{self._limit} deliveries and no end: does a handler publish what it handles itself?"
            )
        # One event a lease, so that each is settled as it was handled, in order.
        return await self._broker.receive(queue.routes.queue, queue.routes.handlers[0].batch or 1)

    async def _release(self) -> None:
        """What became due enters the log, where the next look finds it."""
        if self._clock is not None:
            self._clock.hold_if_stale()
            await self._clock.fire_schedules(self._broker)
        for stream in {queue.stream for queue in self._queues}:
            await self._broker.tick(stream)

    async def _handle(self, queue: _Queue, lease: AsyncLease) -> None:
        handled = await handle_lease(self._broker, queue.routes, lease, queue.settings, queue.run_other_code)
        self._deliveries += handled
        if self._clock is not None:
            # What it wrote, a retry or a delayed event, stands still however long the next handler takes.
            self._clock.hold()
        unmeant = [one.error for one in handled if one.error is not None and not meant(one.error)]
        if self._raises and unmeant:
            raise unmeant[0]
