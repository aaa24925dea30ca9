"""An app at work: connect, declare, consume, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._async.listener import AsyncSubscription
from pgmb._core import loggers
from pgmb._core.connecting import with_options
from pgmb._core.observer import Instrumentation
from pgmb._core.patterns import TopicHints
from pgmb.app.consumer import Consumer
from pgmb.app.declaring import Declarations, QueueSettings, QueueSpec
from pgmb.app.heartbeats import Heartbeats
from pgmb.app.idle import IdlePoller
from pgmb.app.kept import kept
from pgmb.app.requests import create_replies
from pgmb.app.routing import Middleware, Routes
from pgmb.app.scheduling import Schedules
from pgmb.app.threads import Threads
from pgmb.errors import QueueNotFound, translated

if TYPE_CHECKING:
    from pgmb.services.parent import Parent

logger = loggers.logger("pgmb.app")

DEFAULT_CONCURRENCY = 10
_SOURCE = "select stream, salt from pgmb.stream_of(%s)"
# Consumers end within their grace period; those that do not are cancelled after this many seconds more.
_OVERTIME_SECONDS = 15.0
_LAST_POLL_SECONDS = 5.0


class WorkSpec(NamedTuple):
    """What a worker process needs to know of its app."""

    dsn: str
    connection: Mapping[str, Any]
    name: str | None
    """The app's."""
    shared: bool
    """Whether apps of other names may consume its queues."""
    queues: Sequence[QueueSpec]
    handled: Sequence[str]
    """All queues that the app has handlers of, also those of other processes."""
    prune: bool
    """Whether to remove patterns that no live worker declares."""
    schedules: Mapping[str, dict[str, Any]]
    answers: bool
    """Whether a handler answers requests."""
    middlewares: Sequence[Middleware]
    instrumentation: Instrumentation | None
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None
    listen: bool
    concurrency: int | None
    """Of every queue; None leaves each its own."""
    grace: float
    unhandled_for: float
    """How long an event that no worker can handle waits for one."""
    close: Callable[[], Awaitable[None]]
    """Closes what handlers opened in the event loop."""
    services: bool | None
    """Whether a process beside this one does upkeep. None: this one fires the app's schedules."""


async def work(spec: WorkSpec, stop: asyncio.Event, started: Callable[[], None] = lambda: None) -> None:
    """Connect, declare the queues and schedules, and consume until `stop` is set.

    `started` is called before the first event is received.
    """
    options: dict[str, Any] = {
        "max_size": len(spec.queues) + 3,
        "fallback_application_name": "pgmb work",
        **spec.connection,
    }
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await aconnect(spec.dsn, **options))
        if spec.instrumentation is not None:
            spec.instrumentation.observe(broker, working=True)
        heartbeats = Heartbeats(
            broker,
            [queue.name for queue in spec.queues],
            spec.name,
            shared=spec.shared,
            handled=spec.handled,
        )
        await heartbeats.begin()
        stack.push_async_callback(heartbeats.depart)
        declarations = Declarations(broker, heartbeats.worker)
        found = await declarations.declare(spec.queues)
        if spec.prune:
            await declarations.prune()
        await declarations.warn()
        if spec.answers:
            await create_replies(broker)
        schedules = Schedules(broker, heartbeats.worker, spec.schedules, spec.name)
        declared = await schedules.declare()
        heartbeats.when_back(declarations.repeat)
        heartbeats.when_back(schedules.repeat)
        if spec.services:
            await stack.enter_async_context(_upkeep(spec))
        elif spec.services is None and declared:
            await stack.enter_async_context(_scheduling(broker))
        if spec.lifespan is not None:
            await stack.enter_async_context(spec.lifespan())
        logger.info("working on %s", ", ".join(queue.name for queue in spec.queues))
        started()
        await _consume(spec, broker, heartbeats, declarations, schedules, found, stop)


async def _consume(
    spec: WorkSpec,
    broker: AsyncBroker,
    heartbeats: Heartbeats,
    declarations: Declarations,
    schedules: Schedules,
    found: Mapping[str, QueueSettings],
    stop: asyncio.Event,
) -> None:
    idle, threads = IdlePoller(broker, heartbeats), Threads("pgmb handler")
    consumers = [
        Consumer(
            broker,
            idle,
            Routes(queue.name, queue.handlers, spec.middlewares, threads, spec.unhandled_for),
            declarations.run_other_code,
            concurrency=spec.concurrency or queue.concurrency or DEFAULT_CONCURRENCY,
            **found[queue.name]._asdict(),
        )
        for queue in spec.queues
    ]

    def changed(queue: str, settings: QueueSettings) -> None:
        for consumer in consumers:
            if consumer.name == queue:
                consumer.lease_for = settings.lease_for
                # Converted while this process works.
                consumer.ordered = settings.ordered

    subscriptions = await _subscribe(broker, spec.queues) if spec.listen else {}
    try:
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(idle.run(subscriptions), name="pgmb idle")
            services: dict[str, Callable[[], Awaitable[None]]] = {
                "heartbeats": heartbeats.run,
                "declarations": lambda: declarations.run(changed),
                "schedules": schedules.run,
            }
            beating = [
                group.create_task(kept(name, run), name=f"pgmb {name}") for name, run in services.items()
            ]
            tasks = [group.create_task(one.run(), name=f"pgmb {one.name}") for one in consumers]
            ending = group.create_task(stop.wait())
            await asyncio.wait([ending, *tasks, polling], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            for consumer in consumers:
                consumer.stop(spec.grace)
            _, late = await asyncio.wait(tasks, timeout=spec.grace + _OVERTIME_SECONDS)
            for task in late:
                logger.warning("%s does not end; exiting without it", task.get_name())
                task.cancel()
            idle.stop()
            for task in beating:
                task.cancel()
            # A receive in progress gets time to return its lease, but the server may be down.
            await asyncio.wait([polling], timeout=_LAST_POLL_SECONDS)
            polling.cancel()
    finally:
        threads.close()


async def _subscribe(broker: AsyncBroker, queues: Sequence[QueueSpec]) -> dict[str, AsyncSubscription]:
    """Subscribe each queue to its topics. Polls find events of queues that change later."""
    listener = broker.listener(tick_every=None)
    subscriptions: dict[str, AsyncSubscription] = {}
    async with broker.own_connection() as conn:
        for queue in queues:
            with contextlib.suppress(QueueNotFound), translated():
                ((stream, salt),) = await (await conn.execute(_SOURCE, [queue.name])).fetchall()
                subscriptions[queue.name] = listener.subscribe(stream, TopicHints(queue.patterns, salt))
    return subscriptions


async def until_signalled(spec: WorkSpec, parent: Parent | None = None) -> None:
    """`work` until SIGTERM or SIGINT, or until `parent` is gone. A SIGINT after that ends it at once.

    The parent is told the app's connection string when the work starts.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    patience = spec.grace + 2 * _OVERTIME_SECONDS

    def end(why: str) -> None:
        logger.info("%s: waiting for running handlers to finish", why)
        loop.call_soon_threadsafe(stop.set)
        # Whatever may hang, the process ends.
        last = threading.Timer(patience, os._exit, [1])
        last.daemon = True
        last.start()

    def started() -> None:
        if parent is not None:
            parent.report(with_options(spec.dsn, spec.connection))

    with contextlib.ExitStack() as stack:
        _on_signals(stack, end, parent)
        if parent is not None:
            parent.when_gone(partial(end, "the parent is gone"))
        try:
            await work(spec, stop, started)
        finally:
            # Not at the end of every work(): the event loop may be shared with those who publish.
            await spec.close()


def _on_signals(stack: contextlib.ExitStack, end: Callable[[str], None], parent: Parent | None) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    seen = False

    # Not the loop's own handlers: those wait for a handler that blocks the loop.
    def signalled(number: int, frame: object) -> None:
        nonlocal seen
        if not seen:
            seen = True
            end(signal.Signals(number).name)
        elif number == signal.SIGINT and (parent is None or not parent.alive):
            # Not at a second SIGTERM: service managers signal all processes, and launchers pass it on.
            # Nor below a living parent, which kills its children when it is signalled twice.
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.signal(number, signalled))


@asynccontextmanager
async def _scheduling(broker: AsyncBroker) -> AsyncGenerator[None]:
    """Publish what is due of any schedule until the end of the block.

    Every process of the app does: each due time publishes once.
    """
    # Not above: a program that only publishes need not load them.
    from pgmb.services import Scheduler, serve

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(broker, [Scheduler()], stop), name="pgmb scheduler")
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def _upkeep(spec: WorkSpec) -> AsyncGenerator[None]:
    """Keep a process running that does the upkeep, until the end of the block."""
    from pgmb.services.supervisor import Supervisor
    from pgmb.services.upkeep import upkeep

    supervisor = Supervisor()
    supervisor.start(upkeep(with_options(spec.dsn, spec.connection), os.environ))
    try:
        yield
    finally:
        await supervisor.finish()
