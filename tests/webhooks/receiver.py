"""An HTTP server on loopback that answers as it is told and remembers what came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self

from aiohttp import web


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[Request], "int | web.Response | Awaitable[int | web.Response]"]


class Receiver:
    """Answers 204 to everything unless `answer` says otherwise."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.got: list[Request] = []
        self.answer: Answer = answer or (lambda _: 204)
        self.under_way = 0
        self.most_under_way = 0

    async def __aenter__(self) -> Self:
        server = web.Server(self._handle)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def until(self, done: Callable[[], bool], within: float = 120.0) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(within):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            got = Request(
                request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read()
            )
            self.got.append(got)
            answer = self.answer(got)
            if isinstance(answer, Awaitable):
                answer = await answer
            return web.Response(status=answer) if isinstance(answer, int) else answer
        finally:
            self.under_way -= 1
