"""The app: handlers by pattern and queue, and the process that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary

from pgmb import cron as expressions
from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._core.durations import seconds
from pgmb._core.observer import Instrumentation
from pgmb._sync.broker import Broker, connect
from pgmb.app import handling, running
from pgmb.app.declaring import QueueSpec, with_handlers
from pgmb.app.group import HandlerGroup
from pgmb.app.handler import Backoff, Handler, Respond, attempts, default_queue
from pgmb.app.options import AnswerOptions, QueueOptions, ScheduleOptions
from pgmb.app.requests import Requests, answering
from pgmb.app.routing import DEFAULT_UNHANDLED_SECONDS, Middleware
from pgmb.errors import Conflict, InvalidArgument, PermissionDenied
from pgmb.types import Duration, Position

P = ParamSpec("P")
R = TypeVar("R")
SingleHandler = TypeVar("SingleHandler", bound=Callable[[Any], object])
BatchHandler = TypeVar("BatchHandler", bound=Callable[[list[Any]], object])
AnyMiddleware = TypeVar("AnyMiddleware", bound=Middleware)
AnyBroker = TypeVar("AnyBroker", Broker, AsyncBroker)
Lifespan = Callable[["App"], AbstractAsyncContextManager[Any]]


def like(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[App, P], R]]:
    """Gives a method the signature of the broker's."""

    def typed(function: Callable[..., Any]) -> Callable[Concatenate[App, P], R]:
        function.__doc__ = method.__doc__
        # What help() and editors show. Evaluated in the method's module.
        function.__signature__ = inspect.signature(method, eval_str=False)  # type: ignore[attr-defined]
        return function

    return typed


class App:
    """Event handlers and the connections they use. Connects when it first works or publishes.

    Without `dsn`, PGMB_DSN, DATABASE_URL or libpq's variables (PGHOST and others) apply. With `listen`, a
    connection of its own waits for notifications, so that queues are polled less often. On shutdown, running
    handlers have `grace` seconds to finish. An event that no handler of a worker takes waits `unhandled_for`
    for a worker that runs other code, then it becomes a dead letter. `lifespan` is an asynchronous context
    manager around the work. A queue that a live worker of an app of another `name` consumes is refused,
    unless both apps say `shared`. Further keywords go to `connect`.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        name: str | None = None,
        shared: bool = False,
        listen: bool = True,
        grace: Duration = 25.0,
        unhandled_for: Duration = DEFAULT_UNHANDLED_SECONDS,
        lifespan: Lifespan | None = None,
        **connection: Any,
    ) -> None:
        if dsn is None:
            dsn = os.environ.get("PGMB_DSN") or os.environ.get("DATABASE_URL") or ""
        self.dsn = dsn
        self.name = name
        self.shared = shared
        self.listen = listen
        self.grace = seconds(grace)
        self.unhandled_for = seconds(unhandled_for)
        if not self.unhandled_for >= 0:
            raise InvalidArgument(f"unhandled_for must be at least 0, got {unhandled_for!r}")
        self.lifespan = lifespan
        self.connection = connection
        self.queues: dict[str, QueueSpec] = {}
        self.middlewares: list[Middleware] = []
        self.observer: Instrumentation | None = None
        self.schedules: dict[str, dict[str, Any]] = {}
        self.answers = False
        self._created: set[str] = set()
        self._lock = threading.Lock()
        self._broker: Broker | None = None
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Opened] = WeakKeyDictionary()

    def __repr__(self) -> str:
        named = "" if self.name is None else f" {self.name!r}"
        return f"<App{named}, queues {sorted(self.queues)}>"

    # -- declaring

    @overload
    def on(
        self,
        *patterns: str,
        batch: int,
        queue: str | None = None,
        concurrency: int | None = None,
        retry: Backoff = None,
        timeout: Duration | None = None,
        max_attempts: int | None = None,
        stream: str | None = None,
        localns: Mapping[str, Any] | None = None,
    ) -> Callable[[BatchHandler], BatchHandler]: ...

    @overload
    def on(
        self,
        *patterns: str,
        queue: str | None = None,
        concurrency: int | None = None,
        retry: Backoff = None,
        timeout: Duration | None = None,
        batch: None = None,
        max_attempts: int | None = None,
        stream: str | None = None,
        localns: Mapping[str, Any] | None = None,
    ) -> Callable[[SingleHandler], SingleHandler]: ...

    def on(
        self,
        *patterns: str,
        queue: str | None = None,
        concurrency: int | None = None,
        retry: Backoff = None,
        timeout: Duration | None = None,
        batch: int | None = None,
        max_attempts: int | None = None,
        stream: str | None = None,
        localns: Mapping[str, Any] | None = None,
    ) -> Callable[[Any], Any]:
        """Handle the events whose topics match. The decorator returns the function unchanged.

        The payload is decoded to the annotated type of the only argument, which may also be a Delivery, or
        with `batch` a list of at most that many. `queue` is by default the function's module and name, as in
        `shop.billing.notify`; a module that is run as a program has its file's name. Of several
        handlers in a queue, every one that matches is called, in registration order. `retry` is the delay
        after a failed attempt, a list of delays, after the last of which the event becomes a dead letter, a
        function of the attempt's number, or None for the queue's backoff. Annotations are resolved in the
        function's module; pass `localns=locals()` where they name types that are defined inside a function.
        """
        _refuse_other_than_text(patterns)

        def register(function: Callable[[Any], Any], respond: Respond | None = None) -> Callable[[Any], Any]:
            handler = Handler(
                self.prepared(function),
                patterns,
                timeout=timeout,
                retry=retry,
                batch=batch,
                localns=localns,
                respond=respond,
            )
            spec = self.queue_spec(queue or default_queue(function))
            spec.set({"max_attempts": max_attempts or handler.attempts, "stream": stream})
            spec.add(handler)
            _raise_concurrency(spec, concurrency)
            return function

        return register

    def prepared(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What is called in place of a handler's function: for apps that bring a framework's habits."""
        return function

    def answer(
        self, *patterns: str, **options: Unpack[AnswerOptions]
    ) -> Callable[[SingleHandler], SingleHandler]:
        """Handle requests: what the function returns or raises is what `request` returns or raises.

        The answer and the ack of the request are committed together. What is published without `request` is
        handled too, and what the function returns is dropped. Takes what `on` takes, but for `batch`.
        """
        if "batch" in options:
            raise InvalidArgument("a request has one answer: answer() takes no batch")

        def answers(function: SingleHandler) -> SingleHandler:
            self.answers = True
            register: Any = self.on(*patterns, **options)
            register(function, answering(self.abroker))
            return function

        return answers

    def queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        stream: str | None = None,
        starting: Position | None = None,
        lease_for: Duration | None = None,
        max_attempts: int | None = None,
        retry: Backoff = None,
        **settings: Unpack[QueueOptions],
    ) -> None:
        """Configure a queue: the settings of `create_queue`, and its `concurrency` per process.

        When the app starts, it creates a missing queue, with its stream. An existing one takes on the
        settings when all live workers declare the same. `retry` holds for handlers without their own.
        """
        _refuse_unknown(settings)
        spec = self.queue_spec(name)
        spec.retry_by(retry)
        _raise_concurrency(spec, concurrency)
        given = {
            "stream": stream,
            "starting": starting,
            "lease_for": lease_for,
            "max_attempts": max_attempts or attempts(retry),
            **settings,
        }
        spec.set(given)

    def middleware(self, function: AnyMiddleware) -> AnyMiddleware:
        """Call this around every delivery: `async def timing(delivery, call_next)`. The first is outermost.

        Around a batch handler, `delivery` is a list of deliveries.
        """
        self.middlewares.append(function)
        return function

    def every(
        self,
        cron: str,
        topic: str,
        payload: Any = None,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        **settings: Unpack[ScheduleOptions],
    ) -> None:
        """Publish an event at each time of a cron expression. Takes what `create_schedule` takes.

        The schedule has the topic's name. While the app works it publishes due events, each in one process.
        It stays when it is no longer declared: drop it with `drop_schedule`.
        """
        expressions.first_after(cron, timezone, datetime.now(UTC))
        given = {"cron": cron, "topic": topic, "payload": payload, "timezone": timezone, **settings}
        if self.schedules.setdefault(name or topic, given) != given:
            raise InvalidArgument(f"there is another schedule {name or topic!r}; pass name=...")

    def group(self, name: str) -> HandlerGroup:
        """A group of reliable handlers: `@app.group("my-node").handler("log-data", ["msg.*"])`."""
        return HandlerGroup(self, name)

    def queue_spec(self, name: str) -> QueueSpec:
        """The spec of a queue, made at the first use of its name."""
        return self.queues.setdefault(name, QueueSpec(name))

    # -- publishing

    @property
    def broker(self) -> Broker:
        """The synchronous broker behind `publish`, connected when it is first asked for.

        The app's queues are created then, where the role may, so that what is published before a first
        worker starts waits for it.
        """
        with self._lock:
            if self._broker is None or self._broker.inherited:
                self._broker = self.observed(connect(self.dsn, **self.connection))
            self.create_queues(self._broker)
            return self._broker

    def create_queues(self, broker: Broker) -> None:
        """Create the queues of the app's handlers, where the broker's role may and no other app has them."""
        for queue in self._not_created():
            with contextlib.suppress(Conflict, PermissionDenied):
                queue.create(broker)
            self._created.add(queue.name)

    async def abroker(self) -> AsyncBroker:
        """The asynchronous broker behind `apublish`, one an event loop. Creates queues as `broker` does."""
        opened = self._opened()
        if opened.broker is None or self._not_created():
            async with opened.lock:
                if opened.broker is None:
                    opened.broker = self.observed(await aconnect(self.dsn, **self.connection))
                for queue in self._not_created():
                    with contextlib.suppress(Conflict, PermissionDenied):
                        await queue.acreate(opened.broker)
                    self._created.add(queue.name)
        return opened.broker

    def _opened(self) -> _Opened:
        for loop in list(self._loops):
            # Of asyncio.run, for example, which a program may call again and again.
            if loop.is_closed() and (left := self._loops.pop(loop, None)) and left.broker is not None:
                left.broker.abandon()
        return self._loops.setdefault(asyncio.get_running_loop(), _Opened())

    def _not_created(self) -> list[QueueSpec]:
        return [queue for queue in self.queues.values() if queue.handlers and queue.name not in self._created]

    @like(Broker.publish)
    def publish(self, *arguments: Any, **options: Any) -> Any:
        return self.broker.publish(*arguments, **options)

    @like(AsyncBroker.publish)
    async def apublish(self, *arguments: Any, **options: Any) -> Any:
        return await (await self.abroker()).publish(*arguments, **options)

    async def request(
        self,
        topic: str,
        payload: Any,
        *,
        timeout: Duration = 30,  # noqa: ASYNC109 - its error names the topic
        key: str | None = None,
        headers: Any = None,
        stream: str = "main",
    ) -> Any:
        """Publish an event and return what its handler returns, which `answer` declared.

        Raises RequestFailed if the handler raised: its `kind` is the name of the exception's class. Raises
        NoAnswer, a TimeoutError, if there is no answer in time: the event stays, and may still be handled.
        """
        broker, opened = await self.abroker(), self._opened()
        if opened.requests is None:
            opened.requests = Requests(broker)
        return await opened.requests.ask(topic, payload, seconds(timeout), headers, key=key, stream=stream)

    def close(self) -> None:
        """Close the connections that `publish` opened."""
        with self._lock:
            broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()

    async def aclose(self) -> None:
        """Close the connections that `apublish` and `request` opened, and those of `publish`."""
        await self._close_loop()
        self.close()

    async def _close_loop(self) -> None:
        opened = self._loops.pop(asyncio.get_running_loop(), None)
        if opened is None:
            return
        async with opened.lock:
            if opened.requests is not None:
                await opened.requests.close()
            if opened.broker is not None:
                await opened.broker.close()

    # -- observing

    def observe_by(self, observer: Instrumentation) -> None:
        """Have the instrumentation observe every broker of the app, existing and future."""
        self.observer = observer
        if self._broker is not None:
            observer.observe(self._broker)
        for opened in list(self._loops.values()):
            if opened.broker is not None:
                observer.observe(opened.broker)

    def observed(self, broker: AnyBroker, *, working: bool = False) -> AnyBroker:
        """The broker, observed if the app is instrumented."""
        if self.observer is not None:
            self.observer.observe(broker, working=working)
        return broker

    # -- working

    async def work(
        self,
        stop: asyncio.Event | None = None,
        *,
        queues: Iterable[str] | None = None,
        concurrency: int | None = None,
        grace: Duration | None = None,
        services: bool | None = None,
    ) -> None:
        """Handle events of all queues or the named ones until `stop` is set. Then finish running handlers.

        With `services`, a child process runs ticker, janitor and scheduler, as with `pgmb work`. By default
        another process must, but this one fires schedules if the app has any; with False it does not.
        """
        spec = self.work_spec(queues, concurrency, grace, services)
        await running.work(spec, stop or asyncio.Event())

    def run(
        self,
        *,
        queues: Iterable[str] | None = None,
        concurrency: int | None = None,
        grace: Duration | None = None,
        services: bool | None = None,
    ) -> None:
        """Handle events until SIGTERM or SIGINT; a SIGINT after that ends it at once.

        `services` is that of `work`.
        """
        asyncio.run(running.until_signalled(self.work_spec(queues, concurrency, grace, services)))

    def work_spec(
        self,
        queues: Iterable[str] | None = None,
        concurrency: int | None = None,
        grace: Duration | None = None,
        services: bool | None = None,
    ) -> running.WorkSpec:
        """What a worker process needs to know. InvalidArgument if a queue has no handler."""
        return running.WorkSpec(
            dsn=self.dsn,
            connection=self.connection,
            name=self.name,
            shared=self.shared,
            queues=with_handlers(self.queues, queues),
            handled=[queue.name for queue in with_handlers(self.queues, None)],
            prune=False,
            schedules=self.schedules,
            answers=self.answers,
            middlewares=self.middlewares,
            instrumentation=self.observer,
            lifespan=None if self.lifespan is None else partial(self.lifespan, self),
            listen=self.listen,
            concurrency=concurrency,
            grace=self.grace if grace is None else seconds(grace),
            unhandled_for=self.unhandled_for,
            close=self._close_loop,
            services=services,
        )

    def handle(self, queue: str, max: int = 1) -> int:
        """Handle up to `max` events of a queue now, one after another. Returns how many; 0 if it is empty.

        Events are settled as by a worker: failures are logged and retried, or become dead letters. The events
        of a batch handler count one by one.
        """
        _refuse_event_loop("ahandle")
        return asyncio.run(self._handle_and_close(queue, max))

    async def ahandle(self, queue: str, max: int = 1) -> int:
        """`handle` inside an event loop."""
        if max < 1:
            raise InvalidArgument(f"max must be at least 1, got {max}")
        (spec,) = with_handlers(self.queues, [queue])
        return await handling.handle_next(
            await self.abroker(), spec, self.middlewares, max, self.unhandled_for
        )

    async def _handle_and_close(self, queue: str, max: int) -> int:
        try:
            return await self.ahandle(queue, max)
        finally:
            await self._close_loop()


class _Opened:
    """What an app opened in one event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.broker: AsyncBroker | None = None
        self.requests: Requests | None = None


def _refuse_other_than_text(patterns: Iterable[object]) -> None:
    """For `@app.on` without parentheses, which would register nothing."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            refused = InvalidArgument(f"invalid pattern: {pattern!r}")
            refused.advise('Name the topics: @app.on("order.*").')
            raise refused


def _refuse_event_loop(instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"called inside an event loop; await {instead}() there")


def _refuse_unknown(settings: Iterable[str]) -> None:
    others = {"self", "name", "patterns", "conn"}
    known = [name for name in inspect.signature(Broker.create_queue).parameters if name not in others]
    for name in settings:
        if name not in known:
            refused = InvalidArgument(f"unknown queue setting {name!r}")
            refused.advise(f"Settings are {', '.join(known)}.")
            raise refused


def _raise_concurrency(spec: QueueSpec, concurrency: int | None) -> None:
    if concurrency is None:
        return
    if concurrency < 1:
        raise InvalidArgument(f"concurrency must be at least 1, got {concurrency}")
    spec.concurrency = max(spec.concurrency or 1, concurrency)
