"""The ASGI application: its parts, what they share, and how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import psycopg
from psycopg_pool import PoolTimeout
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb.errors import PgmbError
from pgmb.server.access import Access
from pgmb.server.database import answering
from pgmb.server.instrumentation import REQUEST_ID, Counters, Instrumentation, RouteTemplates
from pgmb.server.limits import FairTurns, Limits, Rates
from pgmb.server.problems import Problem, problem_of

DIRECT_SEND: Final = "pgmb.send"
"""The key of the host's send function in the scope. Event streams use it, bypassing the middleware."""


class Context:
    """What the parts of a running application share."""

    def __init__(
        self,
        broker: AsyncBroker,
        limits: Limits,
        closing: AsyncExitStack,
        hung: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.broker = broker
        self.hung = hung
        """Names the services of this process that make no progress."""
        self.limits = limits
        self.access = Access(broker, rates=Rates(limits.requests_per_second, limits.burst))
        closing.push_async_callback(self.access.close)
        # Half of the connections, so that changes do not wait for readings, which may take long.
        self.readings = FairTurns(broker.pool_stats.get("pool_max", 2) // 2)
        """Reading requests under way, by key."""
        self.counts = Counters()
        self.draining = False
        """Whether the process is shutting down and accepts no new clients."""
        self._closing = closing
        self._drains: list[Callable[[], Awaitable[None]]] = []

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` when the application ends, in reverse order of registration."""
        self._closing.push_async_callback(close)

    def on_drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Call `drain` when the process is about to end, to finish long requests."""
        self._drains.append(drain)

    async def drain(self) -> None:
        """Become unready, and end long requests. Repeated calls have no effect."""
        if not self.draining:
            self.draining = True
            for drain in self._drains:
                await drain()


logger = logging.getLogger("pgmb.server")

Part: TypeAlias = Callable[[Context], Sequence[BaseRoute]]


class Application:
    """An ASGI application that can be served by itself or mounted into another one.

    A mounted application gets no lifespan events: it starts with its first request. Give the host `lifespan`
    as its own, or call `close`, so that its connections are closed.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        parts: Sequence[Part],
        broker: AsyncBroker | None = None,
        limits: Limits | None = None,
        max_size: int = 10,
        hung: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._dsn = dsn
        self._hung = hung
        self._given = broker
        self._parts = parts
        self._limits = limits or Limits()
        self._max_size = max_size
        self._lock = asyncio.Lock()
        self._closing: AsyncExitStack | None = None
        self._context: Context | None = None
        self._app: ASGIApp | None = None

    async def start(self) -> None:
        """Connect, and start background tasks. Repeated calls have no effect."""
        async with self._lock:
            if self._app is not None:
                return
            async with AsyncExitStack() as closing:
                broker = self._given
                if broker is None:
                    broker = await closing.enter_async_context(
                        await aconnect(
                            self._dsn, max_size=self._max_size, fallback_application_name="pgmb http"
                        )
                    )
                context = Context(broker, self._limits, closing, self._hung)
                routes = [route for part in self._parts for route in part(context)]
                app = Starlette(
                    routes=routes,
                    exception_handlers={
                        **dict.fromkeys((Problem, PgmbError, psycopg.Error, PoolTimeout), _known_error),
                        404: _not_found,
                        405: _not_allowed,
                        500: _internal_error,
                    },
                )
                # Such redirects would contain the Host header of the request, which the client controls.
                app.router.redirect_slashes = False
                self._closing = closing.pop_all()
                self._context = context
                self._app = Instrumentation(app, context.counts, RouteTemplates(routes))

    async def drain(self) -> None:
        """Make /readyz fail, and end long polls and event streams.

        Call it when the process is told to stop: servers wait for open requests, and these would not end.
        """
        if self._context is not None:
            await self._context.drain()

    async def close(self) -> None:
        """Undo `start`. Repeated calls have no effect."""
        closing, self._closing, self._app, self._context = self._closing, None, None, None
        if closing is not None:
            await closing.aclose()

    @asynccontextmanager
    async def lifespan(self, _host: Any = None) -> AsyncGenerator[None]:
        """For the host's `lifespan=`, or for `async with`. It drains on SIGINT and SIGTERM."""
        await self.start()
        try:
            with draining(self.drain):
                yield
        finally:
            await self.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        try:
            if self._app is None:
                await self.start()
        except Exception as error:
            answer = problem_of(error)
            if answer is None or scope["type"] != "http":
                raise
            await answer.response()(scope, receive, send)
            return
        assert self._app is not None  # noqa: S101
        assert self._context is not None  # noqa: S101
        scope[DIRECT_SEND] = send
        with answering(self._context.broker):
            await self._app(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        async with self.lifespan():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


async def _known_error(request: Request, error: Exception) -> Response:
    answer = problem_of(error)
    return await _internal_error(request, error) if answer is None else answer.response()


async def _not_found(_: Request, __: Exception) -> Response:
    return Problem(404, "not_found", "not found").response()


async def _not_allowed(_: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None)
    return Problem(405, "method_not_allowed", "method not allowed", headers=headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    request_id = request.scope.get(REQUEST_ID, "-")
    logger.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
    return Problem(500, "internal", "internal error; see the server's log").response()


_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def draining(drain: Callable[[], Awaitable[None]]) -> Generator[None]:
    """Call `drain` on SIGINT and SIGTERM, in addition to the existing handlers.

    Signals without a Python handler are left alone, and so are all signals outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    begun: set[asyncio.Future[None]] = set()
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}

    def begin() -> None:
        begun.add(asyncio.ensure_future(drain()))

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(begin)
        earlier = before[signal.Signals(number)]
        if callable(earlier):
            earlier(number, frame)

    chained = [number for number, handler in before.items() if callable(handler)]
    for number in chained:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in chained:
            # Unless another handler was installed meanwhile.
            if signal.getsignal(number) is handle:
                signal.signal(number, before[number])
        for task in begun:
            task.cancel()


def mounted_at(prefix: str, application: ASGIApp) -> ASGIApp:
    """Wrap an application for hosts, such as Litestar, that strip the prefix without setting `root_path`.

    It restores the full path and sets `root_path`, so that links work. Starlette and FastAPI do so already.
    """

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            above = scope.get("root_path", "")
            raw = scope.get("raw_path")
            path = (
                above + prefix + scope["path"]
                if raw is None
                else unquote(raw.partition(b"?")[0].decode("latin-1"))
            )
            scope = {**scope, "path": path, "root_path": above + prefix}
        await application(scope, receive, send)

    return asgi
