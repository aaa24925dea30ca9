"""For whoever runs it: /livez, /readyz and /metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec
import psycopg
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from psycopg_pool import PoolTimeout
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from pgmb.server.context import Context
from pgmb.server.counts import Counts
from pgmb.server.operations import counted, readiness, scraping
from pgmb.server.operations.readiness import Check, Readiness
from pgmb.server.operations.shared import Shared

logger = logging.getLogger("pgmb.server")

_READY_WITHIN: Final = 2.0
_SCRAPED_WITHIN: Final = 8.0
_UNCACHED: Final = {"Cache-Control": "no-store"}


def routes(context: Context, *, metrics_public: bool = False) -> list[BaseRoute]:
    """/livez and /readyz answer whoever asks; /metrics needs `inspect` unless it is public."""
    operations = Operations(context, metrics_public)
    context.on_close(operations.close)
    return [
        Route("/livez", operations.live),
        Route("/readyz", operations.ready),
        Route("/metrics", operations.metrics),
    ]


class Operations:
    def __init__(self, context: Context, metrics_public: bool) -> None:
        self._context = context
        self._metrics_public = metrics_public
        self._checks = Shared(partial(readiness.look, context.broker))
        self._status = Shared(partial(scraping.look, context.broker))

    async def close(self) -> None:
        await self._checks.close()
        await self._status.close()

    async def live(self, _: Request) -> Response:
        """The loop turns: nobody else is asked."""
        return PlainTextResponse("ok\n", headers=_UNCACHED)

    async def ready(self, _: Request) -> Response:
        """200 or 503, and why."""
        try:
            checks = dict(await self._checks.get(_READY_WITHIN))
        except TimeoutError:
            checks = {"database": readiness.silent()}
        if self._context.draining:
            checks["staying"] = Check(False, "the process is about to end")
        told = Readiness.of(checks)
        return Response(
            msgspec.json.encode(told),
            200 if told.ready else 503,
            headers=_UNCACHED,
            media_type="application/json",
        )

    async def metrics(self, request: Request) -> Response:
        """In the format that the scraper asks for."""
        if not self._metrics_public:
            await self._context.access.need(request, "inspect")
        try:
            status = await self._status.get(_SCRAPED_WITHIN)
        except (TimeoutError, psycopg.Error, PoolTimeout) as error:
            logger.warning("metrics: the database does not answer: %s", type(error).__name__)
            status = None
        registry = CollectorRegistry()
        registry.register(_Shown(self._context.counts, status))
        ProcessCollector(registry=registry)
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={**_UNCACHED, "Content-Type": media_type})


class _Shown(Collector):
    """What one scrape shows."""

    def __init__(self, counts: Counts, status: scraping.Status | None) -> None:
        self._counts = counts
        self._status = status

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from counted.families(self._counts)
        yield from scraping.families(self._status)
