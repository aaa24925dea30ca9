"""The frozen clock: what waits for a time is due when the clock says so, and not before."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb.testing import FrozenClock, drain, published


def payloads(lease: Any) -> list[Any]:
    return [event.payload for event in lease]


def test_a_retry_with_an_hours_backoff_comes_after_an_hour(
    dsn: str, broker: pgmb.Broker, clock: FrozenClock
) -> None:
    app = pgmb.App(dsn)
    attempts: list[int] = []

    @app.on("a", queue="q", retry=lambda attempt: 3600 * attempt)
    def handle(event: pgmb.Delivery[int]) -> None:
        attempts.append(event.attempt)
        raise RuntimeError

    broker.publish("a", 1)
    drain(app)
    clock.advance(3500)
    assert drain(app).deliveries == []
    clock.advance(101)
    drain(app)
    clock.advance(3601)
    assert drain(app).deliveries == [], "the second wait is two hours"
    clock.advance(timedelta(hours=1))
    drain(app)
    assert attempts == [1, 2, 3]


def test_an_event_with_a_delay_comes_when_it_is_due(broker: pgmb.Broker, clock: FrozenClock) -> None:
    broker.create_queue("q")
    broker.publish("a", 1, delay=60)
    clock.advance(50)
    assert not broker.receive("q")
    clock.advance(10)
    assert payloads(broker.receive("q")) == [1]


def test_no_time_passes_between_looks(dsn: str, broker: pgmb.Broker, clock: FrozenClock) -> None:
    """A handler asks to be called again in 2 s, and 2.1 s of real time go by."""
    app = pgmb.App(dsn)

    @app.on("a", queue="q", retry=2, max_attempts=3)
    def handle(payload: int) -> None:
        raise RuntimeError

    broker.publish("a", 1)
    assert drain(app).retried == 1
    for _ in range(3):
        time.sleep(0.7)
        assert drain(app).deliveries == []
    clock.advance(2)
    assert drain(app).retried == 1


def test_a_long_drain_is_no_time_either(dsn: str, broker: pgmb.Broker, clock: FrozenClock) -> None:
    app = pgmb.App(dsn)

    @app.on("fails", queue="fails", retry=0.5)
    def fails(payload: int) -> None:
        raise RuntimeError

    @app.on("slow", queue="slow")
    def slow(payload: int) -> None:
        time.sleep(0.6)

    broker.publish("fails", 1)
    broker.publish_many("slow", range(2))
    drained = drain(app)
    assert (drained.retried, drained.handled) == (1, 2)


def test_leases_expire(broker: pgmb.Broker, clock: FrozenClock) -> None:
    broker.create_queue("q", lease_for=300)
    broker.publish("a", 1)
    lease = broker.receive("q")
    clock.advance(280)
    assert not broker.receive("q")
    lease.extend()
    clock.advance(280)
    assert not broker.receive("q")
    clock.advance(21)
    assert [event.attempt for event in broker.receive("q")] == [2]
    with pytest.raises(pgmb.LeaseLost):
        lease.ack()


def test_leases_of_retries_expire(broker: pgmb.Broker, clock: FrozenClock) -> None:
    broker.create_queue("q", lease_for=300)
    broker.publish("a", 1)
    broker.receive("q").retry(after=0)
    assert [event.attempt for event in broker.receive("q")] == [2]
    clock.advance(280)
    assert not broker.receive("q")
    clock.advance(21)
    assert [event.attempt for event in broker.receive("q")] == [3]


def test_deduplication_windows_end(broker: pgmb.Broker, clock: FrozenClock) -> None:
    def publish() -> Any:
        return broker.publish("a", 1, dedup_key="k", dedup_for=600)

    first = publish()
    clock.advance(580)
    assert publish() == first
    clock.advance(21)
    assert publish() != first


def test_times_to_live_end_and_ids_stay(broker: pgmb.Broker, clock: FrozenClock) -> None:
    broker.create_queue("q", ttl=600)
    ids = [broker.publish("a", n) for n in range(2)]
    clock.advance(580)
    assert payloads(broker.receive("q", 1)) == [0]
    clock.advance(21)
    assert not broker.receive("q")
    assert [event.id for event in published(broker)] == ids
    assert [letter.event.id for letter in broker.dead_letters("q")] == ids[1:]


def test_rates_are_paid_by_the_clock(dsn: str, broker: pgmb.Broker, clock: FrozenClock) -> None:
    app = pgmb.App(dsn)
    app.queue("q", rps=1)

    @app.on("a", queue="q")
    def handle(payload: int) -> None: ...

    broker.publish_many("a", range(100))
    drain(app)
    assert drain(app).handled == 0
    handled = 0
    for _ in range(20):
        clock.advance(1)
        handled += drain(app).handled
    assert 20 <= handled <= 25


@pytest.mark.parametrize(("missed", "expected"), [("last", 1), ("all", 2)])
def test_schedules_fall_due_where_cron_puts_them(
    dsn: str, broker: pgmb.Broker, clock: FrozenClock, missed: Any, expected: int
) -> None:
    app = pgmb.App(dsn)
    due: list[str] = []

    @app.on("hourly", queue="q")
    def handle(event: pgmb.Delivery[Any]) -> None:
        due.append(event.headers["due_at"])

    broker.create_schedule("s", "0 * * * *", "hourly", 1, missed=missed)
    drain(app)
    assert due == []
    # To five minutes before the hour, over it, and over two more at once.
    clock.advance(timedelta(minutes=55 - clock.now.minute % 60) if clock.now.minute < 55 else 0)
    drain(app)
    assert due == []
    clock.advance(600)
    drain(app)
    clock.advance(600)
    drain(app)
    assert len(due) == 1
    assert due[0].endswith(":00:00Z")
    clock.advance(7200)
    drain(app)
    assert len(due) == 1 + expected
    assert due[-1] == clock.now.strftime("%Y-%m-%dT%H:00:00Z")


def test_schedules_of_an_app_begin_with_the_first_drain(
    dsn: str, broker: pgmb.Broker, clock: FrozenClock
) -> None:
    app = pgmb.App(dsn)
    app.every("* * * * *", "every.minute", 1)
    seen: list[int] = []

    @app.on("every.minute", queue="q")
    def handle(payload: int) -> None:
        seen.append(payload)

    drain(app)
    for _ in range(5):
        clock.advance(60)
        drain(app)
    assert len(seen) == 5


def test_retention_goes_by_the_clock(
    broker: pgmb.Broker, clock: FrozenClock, db: psycopg.Connection[Any]
) -> None:
    broker.alter_stream("main", keep_for=3600)
    broker.publish("a", 1)
    broker.rotate()
    broker.publish("a", 2)
    broker.maintain()
    clock.advance(3500)
    broker.maintain()
    assert db.execute("select count(*) from pgmb.segment where dropped_at is not null").fetchone() == (0,)
    clock.advance(200)
    broker.maintain()
    assert db.execute("select count(*) from pgmb.segment where dropped_at is not null").fetchone() == (1,)


def test_time_goes_forward_only(clock: FrozenClock) -> None:
    before = clock.now
    assert clock.advance(0) == before
    assert clock.advance(90) == before + timedelta(seconds=90)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_when_it_is_closed_time_passes_again(dsn: str, broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.publish("a", 1, delay=3600)
    with FrozenClock(broker) as clock:
        clock.advance(3599.9)
        broker.publish("a", 2, delay=0.1)
    seen: list[int] = []
    deadline = time.monotonic() + 60
    while len(seen) < 2 and time.monotonic() < deadline:
        drain(seen.append, "q", broker=broker)
    assert sorted(seen) == [1, 2]
