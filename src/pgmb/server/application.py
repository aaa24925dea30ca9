"""The ASGI application: parts over one broker, started with the first request or by the lifespan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg_pool import PoolTimeout
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb.errors import PgmbError
from pgmb.server.context import WAY_OUT, Context
from pgmb.server.limits import Limits
from pgmb.server.problems import Problem, problem_of
from pgmb.server.signals import draining
from pgmb.server.templates import Templates
from pgmb.server.watching import REQUEST_ID, Watching

logger = logging.getLogger("pgmb.server")

Part: TypeAlias = Callable[[Context], Sequence[BaseRoute]]


class Application:
    """An ASGI application that can be served by itself or mounted into another one.

    A mounted one is not told when its host starts and ends: it starts with its first request. Give the host
    `lifespan` as its own, or call `close`, so that its connections end in good order.
    """

    def __init__(
        self,
        dsn: str = "",
        *,
        parts: Sequence[Part],
        broker: AsyncBroker | None = None,
        limits: Limits | None = None,
        max_size: int = 10,
    ) -> None:
        self._dsn = dsn
        self._given = broker
        self._parts = parts
        self._limits = limits or Limits()
        self._max_size = max_size
        self._lock = asyncio.Lock()
        self._closing: AsyncExitStack | None = None
        self._context: Context | None = None
        self._app: ASGIApp | None = None

    async def start(self) -> None:
        """Connect, and begin what runs beside requests. Nothing changes if it has started."""
        async with self._lock:
            if self._app is not None:
                return
            async with AsyncExitStack() as closing:
                broker = self._given
                if broker is None:
                    broker = await closing.enter_async_context(
                        await aconnect(self._dsn, max_size=self._max_size)
                    )
                context = Context(broker, self._limits, closing)
                routes = [route for part in self._parts for route in part(context)]
                app = Starlette(
                    routes=routes,
                    exception_handlers={
                        **dict.fromkeys((Problem, PgmbError, psycopg.Error, PoolTimeout), _foreseen),
                        404: _not_found,
                        405: _not_allowed,
                        500: _unforeseen,
                    },
                )
                # Its redirects name the host that the request named.
                app.router.redirect_slashes = False
                self._closing = closing.pop_all()
                self._context = context
                self._app = Watching(app, context.counts, Templates(routes))

    async def drain(self) -> None:
        """Before the end: /readyz says no, and those who wait for events are sent away.

        Call it when the process is told to stop: a server waits for requests, and these would last for ever.
        """
        if self._context is not None:
            await self._context.drain()

    async def close(self) -> None:
        """End what `start` began. May be called again."""
        closing, self._closing, self._app, self._context = self._closing, None, None, None
        if closing is not None:
            await closing.aclose()

    @asynccontextmanager
    async def lifespan(self, _host: Any = None) -> AsyncGenerator[None]:
        """For the host's `lifespan=`, or for `async with`. When the process is told to stop, it drains."""
        await self.start()
        try:
            with draining(self.drain):
                yield
        finally:
            await self.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
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
        scope[WAY_OUT] = send
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
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


async def _foreseen(request: Request, error: Exception) -> Response:
    answer = problem_of(error)
    return await _unforeseen(request, error) if answer is None else answer.response()


async def _not_found(_: Request, __: Exception) -> Response:
    return Problem(404, "not_found", "there is nothing here").response()


async def _not_allowed(_: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None)
    return Problem(405, "method_not_allowed", "not a method of this", headers=headers).response()


async def _unforeseen(request: Request, error: Exception) -> Response:
    asked = request.scope.get(REQUEST_ID, "-")
    logger.error("request %s failed: %s", asked, type(error).__name__, exc_info=error)
    return Problem(500, "internal", "this should not have happened; the log says more").response()
