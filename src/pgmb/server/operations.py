"""Routes for operators: `/`, `/livez`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import msgspec
import psycopg
from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from psycopg.rows import tuple_row
from psycopg_pool import PoolTimeout
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from pgmb import schema
from pgmb._async.broker import AsyncBroker
from pgmb._core.concurrency import AsyncDeadline
from pgmb.server.application import Context
from pgmb.server.metrics import (
    DatabaseStatus,
    answers,
    database_families,
    pool_families,
    process_families,
    read_status,
)
from pgmb.server.tasks import SharedResult

logger = logging.getLogger("pgmb.server")

_READY_SECONDS: Final = 2.0
_METRICS_SECONDS: Final = 8.0
_UP_SECONDS: Final = 1.8
"""Within this time the database must take a request's key and answer. Scrapers wait for 5 seconds or more."""
_UNCACHED: Final = {"Cache-Control": "no-store"}


def routes(
    context: Context,
    *,
    metrics_public: bool = False,
    families: Callable[[], Iterable[Metric]] = tuple,
) -> list[BaseRoute]:
    """/livez and /readyz are public; /metrics needs the scope `inspect` unless it is public."""
    operations = Operations(context, metrics_public, families)
    context.on_close(operations.close)
    return [
        Route("/", root, methods=["GET"]),
        Route("/livez", operations.live),
        Route("/readyz", operations.ready),
        Route("/metrics", operations.metrics),
    ]


class Operations:
    def __init__(
        self, context: Context, metrics_public: bool, families: Callable[[], Iterable[Metric]]
    ) -> None:
        self._context = context
        self._metrics_public = metrics_public
        self._families = families
        self._checks = SharedResult(partial(examine, context.broker))
        self._up = SharedResult(partial(answers, context.broker))
        self._status = SharedResult(partial(read_status, context.broker))

    async def close(self) -> None:
        await self._checks.close()
        await self._up.close()
        await self._status.close()

    async def live(self, _: Request) -> Response:
        """200 while this process, its services and those beside it run. The database is not checked."""
        if hung := self._context.hung():
            return PlainTextResponse(f"no progress: {', '.join(hung)}\n", 503, headers=_UNCACHED)
        return PlainTextResponse("ok\n", headers=_UNCACHED)

    async def ready(self, _: Request) -> Response:
        """200 or 503, with the result of each check."""
        try:
            checks = dict(await self._checks.get(_READY_SECONDS))
        except TimeoutError:
            checks = {"database": silent()}
        if hung := self._context.hung():
            checks["services"] = Check(False, f"no progress: {', '.join(hung)}")
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
        """Metrics in the format that the scraper accepts.

        Keys are in the database. While it does not answer, a scraper with any key gets `pgmb_up 0` and
        nothing else, which `/readyz` tells everybody.
        """
        up, status, permitted = False, None, self._metrics_public
        if permitted:
            self._context.access.count_address(request)
        try:
            async with asyncio.timeout(_UP_SECONDS):
                if not permitted:
                    await self._context.access.need(request, "inspect")
                permitted = True
                up = await self._up.get(_UP_SECONDS)
            status = await self._status.get(_METRICS_SECONDS)
        except (TimeoutError, psycopg.Error, PoolTimeout) as error:
            logger.warning("metrics: the database does not answer: %s", type(error).__name__)
        registry = CollectorRegistry()
        families = list(self._families()) if permitted else []
        registry.register(_Scrape(self._context if permitted else None, up, status, families))
        if permitted:
            ProcessCollector(registry=registry)
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={**_UNCACHED, "Content-Type": media_type})


class _Scrape(Collector):
    """The metrics of one scrape."""

    def __init__(
        self, context: Context | None, up: bool, status: DatabaseStatus | None, families: Iterable[Metric]
    ) -> None:
        self._context = context
        self._up = up
        self._status = status
        self._families = families

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self._context is not None:
            yield from process_families(self._context.counts)
            yield from pool_families(self._context.broker.pool_stats)
        yield from self._families
        yield from database_families(self._status, up=self._up)


async def root(request: Request) -> Response:
    """Redirect browsers to the dashboard; list the paths for other clients."""
    below = request.scope.get("root_path", "")
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{below}/ui", 303, headers={"Vary": "Accept"})
    places = {
        "openapi": "/v1/openapi.json",
        "dashboard": "/ui",
        "live": "/livez",
        "ready": "/readyz",
        "metrics": "/metrics",
    }
    return JSONResponse({name: below + path for name, path in places.items()}, headers={"Vary": "Accept"})


_SERVER: Final = """
select (select version from pgmb.installation), pg_is_in_recovery(),
  current_setting('transaction_read_only')::boolean
"""
_PROGRESS: Final = """
select count(*) filter (where unticked_for > %(unticked)s * interval '1 second'),
  count(*) filter (where overdue_for > %(overdue)s * interval '1 second')
from pgmb.stream_health()
"""

UNTICKED_SECONDS: Final = 30.0
"""Seconds that events may wait for a tick. A running ticker needs milliseconds."""
OVERDUE_SECONDS: Final = 60.0
"""Seconds that a delayed event may be late."""


class Check(msgspec.Struct, omit_defaults=True):
    ok: bool
    detail: str | None = None


class Readiness(msgspec.Struct):
    ready: bool
    checks: dict[str, Check]

    @classmethod
    def of(cls, checks: dict[str, Check]) -> Readiness:
        # Requests are served without a ticker, here as well as by every other process.
        needed = [check for name, check in checks.items() if name not in ("progress", "services")]
        return cls(all(check.ok for check in needed), checks)


async def examine(broker: AsyncBroker) -> dict[str, Check]:
    """Check the database. The route is public, so the details contain no text of the server's errors."""
    try:
        # Probes come every few seconds: so they also find, for all requests, connections that get no answer.
        with AsyncDeadline("readiness", broker.break_off).enforced():
            async with broker.own_connection() as connection:
                cursor = connection.cursor(row_factory=tuple_row)
                await cursor.execute(_SERVER)
                version, recovering, read_only = await cursor.fetchone() or (None, False, False)
                checks = {
                    "database": Check(True),
                    "schema": _schema(version),
                    "primary": _primary(recovering, read_only),
                }
                if all(check.ok for check in checks.values()):
                    await cursor.execute(
                        _PROGRESS, {"unticked": UNTICKED_SECONDS, "overdue": OVERDUE_SECONDS}
                    )
                    checks["progress"] = _progress(await cursor.fetchone())
                return checks
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return {"database": Check(True), "schema": _schema(None)}
    except psycopg.errors.InsufficientPrivilege:
        return {"database": Check(False, "the role may not do what the server does")}
    except (psycopg.Error, PoolTimeout):
        return {"database": silent()}


def silent() -> Check:
    return Check(False, "the database does not answer")


def _schema(version: int | None) -> Check:
    if schema.works_with(version):
        return Check(True, f"version {version}")
    found = "it is not installed" if version is None else f"it is at version {version}"
    return Check(False, f"version {schema.VERSION} is needed, {found}")


def _primary(recovering: bool, read_only: bool) -> Check:
    if recovering:
        return Check(False, "the server is a standby")
    return Check(False, "the server takes no writes") if read_only else Check(True)


def _progress(row: Any) -> Check:
    unticked, overdue = row
    if unticked:
        return Check(False, f"streams with events and without ticks: {unticked}; is a ticker running?")
    if overdue:
        return Check(False, f"streams with events that are overdue: {overdue}; is a ticker running?")
    return Check(True)
