"""Prometheus: the state of queues, streams and readers, asked of the database at each scrape."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import psycopg
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pgmb._core.connecting import connect
from pgmb.telemetry.snapshot import SECTIONS, BrokerStatus, Budget, Queue, Snapshot, Stream, decode

logger = logging.getLogger("pgmb.telemetry")

Column: TypeAlias = tuple[str, str, Callable[[Any], float | None]]


def _oldest_age(queue: Queue) -> float:
    # Of an empty queue nothing is old: alerts on this need no other case.
    return queue.oldest_age or 0.0


QUEUE_GAUGES: list[Column] = [
    ("pgmb_queue_waiting", "Events not yet received: see pgmb_queue_bound.", lambda queue: queue.waiting),
    ("pgmb_queue_behind", "Numbers of the stream after its position.", lambda queue: queue.behind),
    ("pgmb_queue_oldest_age_seconds", "Age of the oldest waiting event, 0 without.", _oldest_age),
    ("pgmb_queue_leases", "Leases that consumers hold.", lambda queue: queue.leases),
    ("pgmb_queue_leased_events", "Events under those leases.", lambda queue: queue.leased_events),
    (
        "pgmb_queue_oldest_lease_age_seconds",
        "Time since the oldest of them was given, 0 without.",
        lambda queue: queue.oldest_lease_age or 0.0,
    ),
    ("pgmb_queue_retries", "Events that wait to be tried again.", lambda queue: queue.retries),
    ("pgmb_queue_dead", "Dead letters.", lambda queue: queue.dead),
    (
        "pgmb_queue_received_per_second",
        "Events received a second, over the last ten seconds.",
        lambda queue: queue.received_per_second,
    ),
    ("pgmb_queue_paused", "1 if the queue is paused.", lambda queue: float(queue.paused)),
]

STREAM_GAUGES: list[Column] = [
    ("pgmb_stream_segments", "Segments of the log.", lambda stream: stream.segments),
    ("pgmb_stream_unsealed_segments", "Segments closed, not sealed.", lambda stream: stream.unsealed),
    ("pgmb_stream_unarchived_segments", "Segments sealed, not archived.", lambda stream: stream.unarchived),
    ("pgmb_stream_events", "Events in the log, estimated.", lambda stream: stream.events),
    ("pgmb_stream_delayed_events", "Events to be published later.", lambda stream: stream.delayed),
    (
        "pgmb_stream_published_per_second",
        "Events published a second, over the last ten seconds.",
        lambda stream: stream.published_per_second,
    ),
    ("pgmb_stream_last_tick_age_seconds", "Time since the last tick.", lambda stream: stream.last_tick_age),
    ("pgmb_stream_bytes", "Size on disk, indexes included.", lambda stream: stream.bytes),
]

READER_GAUGES: list[Column] = [
    ("pgmb_reader_waiting", "Events not yet confirmed: an upper estimate.", lambda reader: reader.waiting),
    ("pgmb_reader_waiting_bytes", "Their size on disk, estimated.", lambda reader: reader.waiting_bytes),
    (
        "pgmb_reader_lag_seconds",
        "Age of the first unread event, 0 without.",
        lambda reader: reader.lag or 0.0,
    ),
    (
        "pgmb_reader_confirmed_age_seconds",
        "Time since it last confirmed its position.",
        lambda reader: reader.confirmed_age,
    ),
    (
        "pgmb_reader_held_seconds",
        "For how long it has held back retention, 0 if it does not.",
        lambda reader: reader.held_for or 0.0,
    ),
    ("pgmb_reader_lost", "1 if retention dropped what it has not read.", lambda reader: float(reader.lost)),
]

RETENTION_GAUGES: list[Column] = [
    (
        "pgmb_retention_held_seconds",
        "For how long segments are kept beyond their time, by who keeps them.",
        lambda holder: holder.held_for,
    ),
    ("pgmb_retention_held_segments", "How many of them.", lambda holder: holder.segments),
]

LAKE_GAUGES: list[Column] = [
    (
        "pgmb_lake_waiting_seconds",
        "For how long the first sealed segment has waited to be archived, 0 without.",
        lambda lake: lake.waiting_for or 0.0,
    ),
    (
        "pgmb_lake_lag_seconds",
        "Age of the first event that is not archived, 0 without.",
        lambda lake: lake.lag or 0.0,
    ),
    (
        "pgmb_lake_damaged_segments",
        "Segments that the table does not hold intact.",
        lambda lake: lake.damaged,
    ),
]

XMIN_GAUGES: list[Column] = [
    ("pgmb_xmin_holders", "What keeps old row versions alive, by kind.", lambda holder: holder.count),
    ("pgmb_xmin_holder_age_seconds", "Age of the oldest one.", lambda holder: holder.age),
    ("pgmb_xmin_holder_age_transactions", "The same in transactions.", lambda holder: holder.xids),
]


class StatusCollector(Collector):
    """Exports what queue_status, stream_status, reader_status and xmin_holders tell, and `pgmb_up`.

    One connection, one statement for each family of metrics. A scrape never fails: without the database
    `pgmb_up` is 0 and the rest is left out; a family that takes too long is left out. The role needs what a
    consumer has; it sees the queues that it may consume.
    """

    def __init__(self, dsn: str | None = None, *, timeout: float = 5.0, **connection: Any) -> None:
        """`timeout` is how long the database may take, to connect and to answer, in seconds."""
        if dsn is None:
            dsn = os.environ.get("PGMB_DSN") or os.environ.get("DATABASE_URL") or ""
        self._dsn = dsn
        self._timeout = timeout
        self._connection = connection
        self._lock = threading.Lock()
        self._held: psycopg.Connection[Any] | None = None
        self._was_up: bool | None = None

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing, so that registering does not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        began = time.perf_counter()
        snapshot = self._look()
        yield GaugeMetricFamily("pgmb_up", "1 if the database answered.", value=float(snapshot is not None))
        yield GaugeMetricFamily(
            "pgmb_scrape_duration_seconds",
            "How long asking the database took.",
            value=time.perf_counter() - began,
        )
        if snapshot is not None:
            yield from families_of(snapshot)

    def close(self) -> None:
        """Close the connection. The next scrape opens another."""
        with self._lock:
            self._drop()

    def _look(self) -> Snapshot | None:
        # A scrape that comes while another waits for the database does not queue up behind it without limit.
        if not self._lock.acquire(timeout=self._timeout):
            return None
        try:
            return self._told(self._asked_anew())
        except psycopg.Error as error:
            self._drop()
            return self._told(None, error)
        finally:
            self._lock.release()

    def _asked_anew(self) -> Snapshot:
        """Once more if the connection had died since the last scrape, perhaps with a server that is back."""
        held = self._held
        try:
            return self._ask()
        except psycopg.Error:
            if held is None or not held.closed:
                raise
        self._drop()
        return self._ask()

    def _ask(self) -> Snapshot:
        milliseconds = max(1, int(self._timeout * 1000))
        if self._held is None:
            options: dict[str, Any] = {
                "connect_timeout": max(2, round(self._timeout)),
                "tcp_user_timeout": milliseconds,
                **self._connection,
            }
            self._held = connect(self._dsn, "pgmb metrics", prepare_threshold=None, **options)
        budget, told = Budget(self._timeout), dict[str, str]()
        value_of(self._held.execute(budget.statement("select 1")))
        for name, query in SECTIONS.items():
            try:
                told[name] = value_of(self._held.execute(budget.statement(query)))
            except psycopg.errors.QueryCanceled:
                self._held.execute("rollback")
                logger.warning("metrics: the database does not tell of %s in time", name)
        return decode(told)

    def _told(self, snapshot: Snapshot | None, error: Exception | None = None) -> Snapshot | None:
        up = snapshot is not None
        if up is not self._was_up:
            if not up:
                logger.warning("metrics: the database does not answer: %s", str(error).strip())
            elif self._was_up is not None:
                logger.info("metrics: the database answers again")
            self._was_up = up
        return snapshot

    def _drop(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()


def value_of(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> Any:
    """The value that a statement of a Budget gives."""
    while cursor.description is None and cursor.nextset():
        pass
    assert cursor.pgresult is not None  # noqa: S101
    found = cursor.pgresult.get_value(0, 0)
    return None if found is None else found.decode()


def families_of(snapshot: Snapshot) -> Iterator[Metric]:
    """What a scrape shows of the database: the families of which it was told in time."""
    incomplete = GaugeMetricFamily(
        "pgmb_scrape_incomplete", "1 where the database did not answer in time.", labels=("family",)
    )
    for name in SECTIONS:
        incomplete.add_metric([name], float(getattr(snapshot, name) is None))
    yield incomplete
    if snapshot.queues is not None:
        yield from _families(QUEUE_GAUGES, ("queue", "stream"), snapshot.queues)
        yield _bounds(snapshot.queues)
    if snapshot.streams is not None:
        yield from _families(STREAM_GAUGES, ("stream",), snapshot.streams)
    if snapshot.readers is not None:
        yield from _families(READER_GAUGES, ("reader", "stream"), snapshot.readers)
    if snapshot.retention is not None:
        yield from _families(RETENTION_GAUGES, ("stream", "kind", "holder"), snapshot.retention)
    if snapshot.lakes is not None:
        yield from _families(LAKE_GAUGES, ("stream",), snapshot.lakes)
    if snapshot.xmin_holders is not None:
        yield from _families(XMIN_GAUGES, ("kind",), snapshot.xmin_holders)
    if snapshot.broker is not None:
        yield from _of_the_broker(snapshot.broker)


def _of_the_broker(broker: BrokerStatus) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "pgmb_dead_letters", "Dead letters since the server's statistics began.", value=broker.dead_letters
    )
    yield GaugeMetricFamily("pgmb_dispatchers", "Dispatchers that are alive.", value=broker.dispatchers)
    yield GaugeMetricFamily(
        "pgmb_workers", "Processes that run handlers and are alive.", value=broker.workers
    )
    if broker.maintained_age is not None:
        yield GaugeMetricFamily(
            "pgmb_last_maintain_age_seconds",
            "Time since maintenance last ended.",
            value=broker.maintained_age,
        )


def _bounds(queues: Iterable[Queue]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "pgmb_queue_bound",
        "1 where a figure of a queue is a bound instead of an exact count.",
        labels=("queue", "stream", "figure", "bound"),
    )
    for queue in queues:
        for bound, figures in (("at_least", queue.at_least), ("at_most", queue.at_most)):
            for figure in figures:
                family.add_metric([queue.queue, queue.stream, figure, bound], 1.0)
    return family


def _families(
    columns: list[Column], labels: tuple[str, ...], rows: Iterable[Queue | Stream | Any]
) -> Iterator[GaugeMetricFamily]:
    for name, description, value_of in columns:
        family = GaugeMetricFamily(name, description, labels=labels)
        for row in rows:
            value = value_of(row)
            if value is not None:
                family.add_metric([str(getattr(row, label)) for label in labels], value)
        yield family


def export_status(
    dsn: str | None = None, registry: CollectorRegistry = REGISTRY, **options: Any
) -> StatusCollector:
    """Register a StatusCollector and return it."""
    collector = StatusCollector(dsn, **options)
    registry.register(collector)
    return collector
