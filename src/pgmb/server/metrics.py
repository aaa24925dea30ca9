"""Prometheus metrics: this process's counters, and the status of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Final, LiteralString

import msgspec
import psycopg
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pgmb._async.broker import AsyncBroker
from pgmb.server.instrumentation import Counters
from pgmb.telemetry.metrics import families_of, value_of
from pgmb.telemetry.snapshot import SECTIONS, Budget, Snapshot, decode

logger = logging.getLogger("pgmb.server")


def process_families(counts: Counters) -> Iterator[Metric]:
    info = GaugeMetricFamily("pgmb_build_info", "The version that runs, as a label.", labels=("version",))
    info.add_metric([version("pgmb")], 1.0)
    yield info
    yield from _requests(counts)
    yield from _sse(counts)


def _requests(counts: Counters) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "pgmb_http_requests", "Requests that were answered.", labels=("route", "method", "status")
    )
    for labels, count in counts.requests.items():
        requests.add_metric(labels, count)
    yield requests
    durations = HistogramMetricFamily(
        "pgmb_http_request_duration_seconds",
        "From the request to the end of its answer; of server-sent events to its beginning.",
        labels=("route",),
    )
    for route, took in counts.durations.items():
        durations.add_metric([route], took.buckets(), took.seconds)
    yield durations
    yield GaugeMetricFamily("pgmb_http_requests_in_progress", "Requests under way.", value=counts.in_progress)


def _sse(counts: Counters) -> Iterator[Metric]:
    yield GaugeMetricFamily("pgmb_sse_clients", "Readers of server-sent events.", value=counts.sse_clients)
    for name, description, value in (
        ("pgmb_sse_events", "Events sent to them.", counts.sse_events),
        ("pgmb_sse_bytes", "Bytes sent to them.", counts.sse_bytes),
        ("pgmb_sse_dropped", "Readers dropped for being too slow.", counts.sse_dropped),
        ("pgmb_sse_resumed", "Readers that came back with a position.", counts.sse_resumed),
        ("pgmb_sse_reset", "Readers whose position was too old.", counts.sse_reset),
        ("pgmb_sse_replayed_events", "Events read again for those that came back.", counts.sse_replayed),
    ):
        yield CounterMetricFamily(name, description, value=value)


_STATES: Final = ("active", "paused", "throttled", "tripped", "disabled")
_SCRAPE_SECONDS: Final = 5.0

_ENDPOINTS: Final[dict[str, LiteralString]] = {
    "states": """
select coalesce(json_object_agg(state, count), '{}')::text
from (select state, count(*) from pgmb.endpoints group by state) s
""",
    "totals": "select json_build_array(delivered, failed)::text from pgmb.endpoint_totals()",
    "backlogs": """
select coalesce(json_agg(json_build_array(
  endpoint, waiting, coalesce(extract(epoch from oldest_age), 0))), '[]')::text
from pgmb.endpoint_backlogs()
""",
}


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrape has found of endpoints. None: it was not told in time."""

    states: dict[str, float] | None = None
    totals: tuple[float, float] | None = None
    """Delivered and failed."""
    backlogs: list[tuple[str, float, float]] | None = None
    """Name, events that wait and the age of the oldest, of the endpoints that are furthest behind."""


class DatabaseStatus(msgspec.Struct, frozen=True):
    """The database's status, and the seconds that reading it took."""

    snapshot: Snapshot
    endpoints: Endpoints
    seconds: float


async def answers(broker: AsyncBroker) -> bool:
    """Whether the database answers. Raises if it does not."""
    async with broker.own_connection() as connection:
        await connection.execute("select 1")
    return True


async def read_status(broker: AsyncBroker) -> DatabaseStatus:
    began, budget = time.perf_counter(), Budget(_SCRAPE_SECONDS)
    told: dict[str, str] = {}
    async with broker.own_connection() as connection:
        for name, query in {**SECTIONS, **_ENDPOINTS}.items():
            try:
                told[name] = value_of(await connection.execute(budget.statement(query)))
            except psycopg.errors.QueryCanceled:
                await connection.execute("rollback")
                logger.warning("metrics: the database does not tell of %s in time", name)
    return DatabaseStatus(decode(told), decode(told, Endpoints), time.perf_counter() - began)


def database_families(status: DatabaseStatus | None, *, up: bool) -> Iterator[Metric]:
    """Metrics of the database. Without a status, only `pgmb_up`."""
    yield GaugeMetricFamily("pgmb_up", "1 if the database answered.", value=float(up))
    if status is None:
        return
    yield GaugeMetricFamily(
        "pgmb_scrape_duration_seconds", "How long asking the database took.", value=status.seconds
    )
    yield from families_of(status.snapshot)
    yield from _of_endpoints(status.endpoints)


def _of_endpoints(endpoints: Endpoints) -> Iterator[Metric]:
    if endpoints.states is not None:
        states = GaugeMetricFamily("pgmb_endpoints", "Endpoints by state.", labels=("state",))
        for state, count in {**dict.fromkeys(_STATES, 0.0), **endpoints.states}.items():
            states.add_metric([state], count)
        yield states
    if endpoints.totals is not None:
        deliveries = CounterMetricFamily(
            "pgmb_endpoint_deliveries",
            "Requests to endpoints, dropped ones included.",
            labels=("outcome",),
        )
        for outcome, count in zip(("delivered", "failed"), endpoints.totals, strict=True):
            deliveries.add_metric([outcome], count)
        yield deliveries
    if endpoints.backlogs is None:
        return
    waiting = GaugeMetricFamily(
        "pgmb_endpoint_waiting",
        "Events that wait for an endpoint, up to 10,000; of the 100 that are furthest behind.",
        labels=("endpoint",),
    )
    oldest = GaugeMetricFamily(
        "pgmb_endpoint_oldest_age_seconds", "Age of the oldest of them.", labels=("endpoint",)
    )
    for endpoint, events, age in endpoints.backlogs:
        waiting.add_metric([endpoint], events)
        oldest.add_metric([endpoint], age)
    yield waiting
    yield oldest


def pool_families(stats: Mapping[str, int]) -> Iterator[Metric]:
    """Metrics of the process's connection pool."""
    size, available = stats.get("pool_size", 0), stats.get("pool_available", 0)
    connections = GaugeMetricFamily(
        "pgmb_pool_connections", "Connections of the pool, by use.", labels=("state",)
    )
    connections.add_metric(["used"], size - available)
    connections.add_metric(["available"], available)
    yield connections
    yield GaugeMetricFamily(
        "pgmb_pool_max_connections", "Most connections that it opens.", value=stats.get("pool_max", 0)
    )
    yield GaugeMetricFamily(
        "pgmb_pool_waiting", "Requests that wait for one.", value=stats.get("requests_waiting", 0)
    )
    yield CounterMetricFamily(
        "pgmb_pool_timeouts", "Requests that waited in vain.", value=stats.get("requests_errors", 0)
    )
