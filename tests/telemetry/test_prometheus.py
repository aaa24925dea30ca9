"""Prometheus gets the state of queues and streams in one statement, and never a failed scrape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import pgmb
from harness.pgbouncer import PgBouncer
from harness.server import Server
from harness.states import lock_queues
from harness.waiting import until, until_true
from pgmb.telemetry.handling import export_handlers
from pgmb.telemetry.metrics import (
    QUEUE_GAUGES,
    READER_GAUGES,
    STREAM_GAUGES,
    XMIN_GAUGES,
    StatusCollector,
)
from pgmb.telemetry.snapshot import SECTIONS
from tests.app.stage import settled, working
from tests.conftest import Connect, FreshServer

pytestmark = pytest.mark.once(15)

Samples = dict[tuple[str, ...], float]


def scrape(registry: CollectorRegistry) -> Samples:
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    """Samples by name and the values of their labels, in the labels' order."""
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def exported(dsn: str, registry: CollectorRegistry) -> Iterator[StatusCollector]:
    collector = StatusCollector(dsn)
    registry.register(collector)
    yield collector
    collector.close()


def test_queues_and_streams_are_told_of(
    dsn: str, exported: StatusCollector, registry: CollectorRegistry, connect: Connect
) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.#"])
        broker.create_queue("idle", ["none"])
        broker.pause("idle", "for a test")
        broker.publish_many("order.paid", range(10))
        broker.publish("order.paid", 1, delay=3600)
        lease = broker.receive("billing", max=4)
        lease.retry(lease.events[0], after=3600)
        lease.bury(lease.events[1], "no")
        # A session that keeps old row versions alive.
        pinning = connect()
        pinning.execute("begin isolation level repeatable read")
        pinning.execute("select 1")
        samples = scrape(registry)
        pinning.execute("rollback")
        assert lease.ack() == 2
    assert samples["pgmb_up",] == 1
    assert samples["pgmb_scrape_duration_seconds",] > 0
    of_billing = ("billing", "main")
    assert samples["pgmb_queue_waiting", *of_billing] == 6
    assert samples["pgmb_queue_oldest_age_seconds", *of_billing] > 0
    assert samples["pgmb_queue_leases", *of_billing] == 1
    assert samples["pgmb_queue_retries", *of_billing] == 1
    assert samples["pgmb_queue_dead", *of_billing] == 1
    assert samples["pgmb_queue_paused", *of_billing] == 0
    assert samples["pgmb_queue_paused", "idle", "main"] == 1
    assert samples["pgmb_stream_delayed_events", "main"] == 1
    assert samples["pgmb_stream_segments", "main"] >= 1
    assert samples["pgmb_stream_bytes", "main"] > 0
    assert samples["pgmb_xmin_holders", "session"] >= 1
    assert samples["pgmb_xmin_holder_age_transactions", "session"] >= 0


def test_readers_are_told_of(dsn: str, exported: StatusCollector, registry: CollectorRegistry) -> None:
    with pgmb.connect(dsn) as broker:
        broker.confirm("main", "lake", broker.position())
        lake = ("lake", "main")
        samples = scrape(registry)
        assert samples["pgmb_reader_lag_seconds", *lake] == 0
        assert samples["pgmb_reader_waiting", *lake] == 0
        assert samples["pgmb_reader_confirmed_age_seconds", *lake] >= 0
        assert samples["pgmb_reader_held_seconds", *lake] == 0
        assert samples["pgmb_reader_lost", *lake] == 0
        broker.publish_many("order.paid", range(10))
        samples = scrape(registry)
    assert samples["pgmb_reader_lag_seconds", *lake] > 0
    assert samples["pgmb_reader_waiting", *lake] == 10
    assert samples["pgmb_reader_waiting_bytes", *lake] > 0


def test_every_gauge_has_a_name_that_prometheus_people_expect(
    exported: StatusCollector, registry: CollectorRegistry
) -> None:
    names = [name for name, _, _ in QUEUE_GAUGES + STREAM_GAUGES + READER_GAUGES + XMIN_GAUGES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("pgmb_") and not name.endswith("_total") for name in names)
    told = {
        family.name: family.type
        for family in text_string_to_metric_families(generate_latest(registry).decode())
    }
    assert set(names) <= told.keys()
    assert {name for name, kind in told.items() if kind != "gauge"} == {"pgmb_dead_letters"}


@pytest.mark.parametrize("queues", [0, 1, 60])
def test_a_scrape_is_one_round_trip_a_family_whatever_the_number_of_queues(
    db: psycopg.Connection[Any],
    exported: StatusCollector,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    queues: int,
) -> None:
    for number in range(queues):
        db.execute("select pgmb.create_queue(%s, '{#}')", [f"queue_{number}"])
    scrape(registry)

    held = exported._held
    assert held is not None
    asked: list[Any] = []
    execute = held.execute

    def counted(statement: Any) -> Any:
        asked.append(statement)
        return execute(statement)

    monkeypatch.setattr(held, "execute", counted)
    samples = scrape(registry)
    assert len(asked) == 1 + len(SECTIONS)
    assert sum(key[0] == "pgmb_queue_waiting" for key in samples) == queues


def test_registering_asks_nothing_and_a_wrong_address_is_down() -> None:
    registry = CollectorRegistry()
    collector = StatusCollector("host=/nowhere/at/all dbname=x", timeout=1)
    registry.register(collector)
    assert scrape(registry)["pgmb_up",] == 0
    assert ("pgmb_queue_waiting", "billing", "main") not in scrape(registry)
    collector.close()


def test_a_database_without_pgmb_is_down(empty_dsn: str, registry: CollectorRegistry) -> None:
    collector = StatusCollector(empty_dsn)
    registry.register(collector)
    assert scrape(registry)["pgmb_up",] == 0
    collector.close()


def test_a_family_that_takes_too_long_is_left_out_and_comes_back(
    dsn: str, registry: CollectorRegistry, connect: Connect
) -> None:
    collector = StatusCollector(dsn, timeout=2)
    registry.register(collector)
    assert scrape(registry)["pgmb_up",] == 1
    blocking = connect()
    blocking.execute("begin")
    lock_queues(blocking)
    told = scrape(registry)
    assert told["pgmb_up",] == 1
    assert told["pgmb_scrape_incomplete", "queues"] == 1
    assert told["pgmb_scrape_incomplete", "streams"] == 0
    blocking.execute("rollback")
    until_true(lambda: scrape(registry)["pgmb_scrape_incomplete", "queues"] == 0)
    collector.close()


def test_a_role_sees_the_queues_that_it_may_consume(
    dsn: str, db: psycopg.Connection[Any], registry: CollectorRegistry
) -> None:
    db.execute("select pgmb.create_queue('billing', '{#}')")
    name = f"scraper_{db.info.backend_pid}"
    db.execute(f"create role {name} login in role pgmb_consumer")
    try:
        collector = StatusCollector(dsn, user=name)
        registry.register(collector)
        samples = scrape(registry)
        assert samples["pgmb_up",] == 1
        assert ("pgmb_stream_segments", "main") in samples
        collector.close()
    finally:
        db.execute(f"drop owned by {name}")
        db.execute(f"drop role {name}")


def test_a_scrape_through_a_pooler_leaves_nothing_behind(
    server: Server, db: psycopg.Connection[Any], registry: CollectorRegistry
) -> None:
    with PgBouncer.start(server, settings={"default_pool_size": 1}) as bouncer:
        dsn = bouncer.dsn(db.info.dbname)
        collector = StatusCollector(dsn, timeout=3)
        registry.register(collector)
        assert [scrape(registry)["pgmb_up",] for _ in range(3)] == [1, 1, 1]
        with psycopg.connect(dsn, autocommit=True) as other:
            assert other.execute("show statement_timeout").fetchone() == ("0",)
        collector.close()


@pytest.mark.crash
def test_scrapes_go_on_while_the_server_restarts(
    fresh_server: FreshServer, install: Callable[[str], None], registry: CollectorRegistry
) -> None:
    server = fresh_server()
    install(server.dsn())
    collector = StatusCollector(server.dsn(), timeout=2)
    registry.register(collector)
    assert scrape(registry)["pgmb_up",] == 1
    seen: list[float] = []
    done = threading.Event()

    def scraping() -> None:
        while not done.is_set():
            seen.append(scrape(registry)["pgmb_up",])

    threads = [threading.Thread(target=scraping) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        server.kill()
        until_true(lambda: 0 in seen)
        server.restart()
        up = len(seen)
        until_true(lambda: 1 in seen[up:])
    finally:
        done.set()
        for thread in threads:
            thread.join()
        collector.close()


async def test_handlers_are_counted_by_outcome(dsn: str, registry: CollectorRegistry) -> None:
    app = pgmb.App(dsn)

    @app.on("order.*", queue="billing", retry=0, max_attempts=3)
    async def charge(order: pgmb.Delivery[str]) -> None:
        if order.payload == "reject":
            raise pgmb.Reject("no")
        if order.payload == "fail" or (order.payload == "once" and order.attempt == 1):
            raise ValueError("odd")

    @app.on("batch.*", queue="batches", batch=10, concurrency=1, retry=3600)
    def some(orders: list[pgmb.Delivery[int]]) -> None:
        for order in orders:
            if order.payload == 1:
                order.retry(3600)
            if order.payload == 2:
                order.reject("no")

    export_handlers(app, registry)
    async with working(app) as broker:
        await broker.publish_many("order.paid", ["fine", "reject", "fail", "once"])
        await broker.publish_many("batch.x", [0, 1, 2, 3])
        counted = ("pgmb_handler_events_total", "done", "batches")
        await until(lambda: scrape(registry).get(counted) == 2.0)
        await until(lambda: settled(broker, "billing"))
    samples = scrape(registry)
    outcomes = {
        key[1:]: value for key, value in samples.items() if key[0] == "pgmb_handler_events_total" and value
    }
    assert outcomes == {
        ("done", "billing"): 2,
        ("buried", "billing"): 2,
        ("retried", "billing"): 3,
        ("done", "batches"): 2,
        ("retried", "batches"): 1,
        ("buried", "batches"): 1,
    }
    assert samples["pgmb_handler_duration_seconds_count", "billing"] == 7
    assert samples["pgmb_handler_running", "billing"] == 0
