"""An app at work: connect, declare, consume, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb.app.consumer import Consumer
from pgmb.app.declaring import Declared, Found, declare
from pgmb.app.idle import Idle
from pgmb.app.recurring import scheduling
from pgmb.app.routing import Routes
from pgmb.app.threads import Threads
from pgmb.errors import InvalidArgument

if TYPE_CHECKING:
    from pgmb.app.app import App

logger = logging.getLogger("pgmb.app")

DEFAULT_CONCURRENCY = 10
# Consumers end by themselves in their grace; what does not end even so is cancelled.
_OVERTIME = 15.0


async def work(
    app: App,
    stop: asyncio.Event,
    queues: Iterable[str] | None = None,
    concurrency: int | None = None,
    grace: float | None = None,
) -> None:
    declared = chosen(app, queues)
    options: dict[str, Any] = {"max_size": len(declared) + 3, **app.connection}
    async with contextlib.AsyncExitStack() as stack:
        connected = app.observed(await aconnect(app.dsn, **options), working=True)
        broker = await stack.enter_async_context(connected)
        found = await declare(broker, declared)
        await stack.enter_async_context(scheduling(broker, app.schedules))
        if app.lifespan is not None:
            await stack.enter_async_context(app.lifespan(app))
        logger.info("working on %s", ", ".join(queue.name for queue in declared))
        await _consume(app, broker, declared, found, stop, concurrency, app.grace if grace is None else grace)


async def _consume(
    app: App,
    broker: AsyncBroker,
    declared: list[Declared],
    found: dict[str, Found],
    stop: asyncio.Event,
    concurrency: int | None,
    grace: float,
) -> None:
    idle, threads = Idle(broker), Threads("pgmb handler")
    consumers = [
        Consumer(
            broker,
            idle,
            Routes(queue.name, queue.handlers, app.middlewares, threads),
            concurrency=concurrency or queue.concurrency or DEFAULT_CONCURRENCY,
            **found[queue.name]._asdict(),
        )
        for queue in declared
    ]
    listener = broker.listener(tick_every=None) if app.listen else None
    streams = {queue.stream for queue in declared}
    try:
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(idle.run(listener, streams), name="pgmb idle")
            tasks = [group.create_task(one.run(), name=f"pgmb {one.name}") for one in consumers]
            ending = group.create_task(stop.wait())
            await asyncio.wait([ending, *tasks, polling], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            for consumer in consumers:
                consumer.stop(grace)
            _, late = await asyncio.wait(tasks, timeout=grace + _OVERTIME)
            for task in late:
                logger.warning("%s does not end; leaving it", task.get_name())
                task.cancel()
            idle.stop()
    finally:
        threads.close()


def chosen(app: App, queues: Iterable[str] | None) -> list[Declared]:
    """The app's queues of these names, or all that have handlers."""
    with_handlers = {name: queue for name, queue in app.queues.items() if queue.handlers}
    if not with_handlers:
        raise InvalidArgument("the app has no handlers")
    names = list(with_handlers) if queues is None else list(queues)
    unknown = [name for name in names if name not in with_handlers]
    if unknown or not names:
        refused = InvalidArgument(
            f"the app has no handler of queue {', '.join(map(repr, unknown)) or '(none)'}"
        )
        refused.advise(f"It has {', '.join(with_handlers)}.")
        raise refused
    return [with_handlers[name] for name in names]


async def until_signalled(
    app: App,
    queues: Iterable[str] | None,
    concurrency: int | None,
    grace: float | None,
    parent: int | None = None,
) -> None:
    """`work` until SIGTERM or SIGINT. A second one ends the process at once.

    `parent` is a pipe that comes to its end when the process is to end as well.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    patience = (app.grace if grace is None else grace) + 2 * _OVERTIME

    def end(why: str) -> None:
        logger.info("%s: finishing", why)
        loop.call_soon_threadsafe(stop.set)
        # Whatever may hang, the process ends.
        last = threading.Timer(patience, os._exit, [1])
        last.daemon = True
        last.start()

    def orphaned(pipe: int) -> None:
        loop.remove_reader(pipe)
        end("the parent is gone")

    with contextlib.ExitStack() as stack:
        _on_signals(stack, end)
        if parent is not None:
            os.set_inheritable(parent, False)
            loop.add_reader(parent, orphaned, parent)
        await work(app, stop, queues, concurrency, grace)


def _on_signals(stack: contextlib.ExitStack, end: Callable[[str], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    seen = False

    # Not the loop's own handlers: those wait for a handler that blocks the loop.
    def signalled(number: int, frame: object) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        end(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM):
        stack.callback(signal.signal, number, signal.signal(number, signalled))
