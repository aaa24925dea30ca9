"""What a scrape asks of the database: the status that telemetry shows, and endpoints by state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from psycopg import sql
from psycopg.rows import tuple_row

from pgmb._async.broker import AsyncBroker
from pgmb.telemetry.metrics import families_of
from pgmb.telemetry.snapshot import QUERY, Snapshot, decode

_STATES: Final = ("active", "paused", "tripped", "disabled")
_ENDPOINTS: Final = """
select state, count(*)::float8, coalesce(sum(delivered), 0)::float8, coalesce(sum(failed), 0)::float8
from pgmb.endpoints group by state
"""
_PATIENCE: Final = 5000
"""Milliseconds that a statement of a scrape may take."""


class Endpoints(msgspec.Struct, frozen=True):
    by_state: dict[str, float]
    delivered: float
    failed: float


class Status(msgspec.Struct, frozen=True):
    """What the database said, and how long it took."""

    snapshot: Snapshot
    endpoints: Endpoints
    seconds: float


async def look(broker: AsyncBroker) -> Status:
    began = time.perf_counter()
    async with broker.connection() as connection, connection.transaction():
        cursor = connection.cursor(row_factory=tuple_row)
        await cursor.execute(
            sql.SQL("set transaction read only; set local statement_timeout = {}").format(
                sql.Literal(_PATIENCE)
            )
        )
        await cursor.execute(QUERY)
        row = await cursor.fetchone()
        await cursor.execute(_ENDPOINTS)
        found = await cursor.fetchall()
    return Status(decode(row[0] if row else ""), _endpoints(found), time.perf_counter() - began)


def _endpoints(rows: list[Any]) -> Endpoints:
    by_state: dict[str, float] = dict.fromkeys(_STATES, 0.0)
    by_state.update((state, count) for state, count, _, _ in rows)
    return Endpoints(by_state, sum(row[2] for row in rows), sum(row[3] for row in rows))


def families(status: Status | None) -> Iterator[Metric]:
    """Without an answer `pgmb_up` is 0, and the rest is left out."""
    yield GaugeMetricFamily("pgmb_up", "1 if the database answered.", value=float(status is not None))
    if status is None:
        return
    yield GaugeMetricFamily(
        "pgmb_scrape_duration_seconds", "How long asking the database took.", value=status.seconds
    )
    yield from families_of(status.snapshot)
    states = GaugeMetricFamily("pgmb_endpoints", "Endpoints by state.", labels=("state",))
    for state, count in status.endpoints.by_state.items():
        states.add_metric([state], count)
    yield states
    deliveries = CounterMetricFamily(
        "pgmb_endpoint_deliveries", "Requests to the endpoints that there are.", labels=("outcome",)
    )
    deliveries.add_metric(["delivered"], status.endpoints.delivered)
    deliveries.add_metric(["failed"], status.endpoints.failed)
    yield deliveries
