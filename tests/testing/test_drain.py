"""drain: handlers run on the spot, settled as they would be, until nothing is left."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb.testing import FrozenClock, aconnected, adrain, assert_published, connected, drain


@dataclass
class Order:
    number: int


def test_handlers_run_until_the_queues_are_empty(dsn: str, broker: pgmb.Broker) -> None:
    app = pgmb.App(dsn)
    seen: list[Any] = []

    @app.on("order.made", queue="billing")
    def bill(order: Order) -> None:
        seen.append(("bill", order.number, threading.current_thread() is threading.main_thread()))
        app.publish("order.paid", order)

    @app.on("order.paid", queue="shipping")
    async def ship(order: Order) -> None:
        seen.append(("ship", order.number))

    broker.publish_many("order.made", [Order(1), Order(2)])
    drained = drain(app)
    assert seen == [("bill", 1, True), ("bill", 2, True), ("ship", 1), ("ship", 2)]
    assert (drained.handled, drained.retried, drained.buried) == (4, 0, 0)
    assert repr(drained) == "Drained(handled=4, retried=0, buried=0)"
    assert_published(app, "order.paid", count=2)
    assert drain(app).deliveries == []
    app.close()


def test_failures_are_settled_as_they_would_be(dsn: str, broker: pgmb.Broker) -> None:
    app = pgmb.App(dsn)

    @app.on("a.*", queue="q", max_attempts=2, retry=0)
    def handle(event: pgmb.Delivery[Order]) -> None:
        if event.topic == "a.reject":
            raise pgmb.Reject("never")
        if event.topic == "a.retry" and event.attempt == 1:
            raise pgmb.Retry(after=0)
        if event.topic == "a.fail":
            raise RuntimeError("broken")

    for topic in ("reject", "retry", "fail", "fine"):
        broker.publish(f"a.{topic}", Order(1))
    broker.publish("a.unfit", {"number": "x"})
    drained = drain(app, broker=broker)
    outcomes = sorted((one.event.topic, one.event.attempt, one.outcome) for one in drained.deliveries)
    assert outcomes == [
        ("a.fail", 1, "retried"),
        ("a.fail", 2, "buried"),
        ("a.fine", 1, "done"),
        ("a.reject", 1, "buried"),
        ("a.retry", 1, "retried"),
        ("a.retry", 2, "done"),
        ("a.unfit", 1, "buried"),
    ]
    unfit = "payload does not fit Order: Expected `int`, got `str` - at `$.number`"
    assert sorted(map(str, drained.errors)) == ["broken", "broken", unfit]
    dead = broker.dead_letters("q")
    assert sorted((letter.event.topic, letter.error) for letter in dead) == [
        ("a.fail", "RuntimeError: broken"),
        ("a.reject", "never"),
        ("a.unfit", unfit),
    ]


def test_a_payload_that_does_not_fit_is_a_dead_letter_and_an_error(dsn: str, broker: pgmb.Broker) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q")
    def handle(order: Order) -> None: ...

    broker.publish("a", {"number": "x"})
    drained = drain(app)
    assert drained.buried == len(drained.errors) == 1


def test_what_was_raised_is_raised_on_request_after_it_was_settled(dsn: str, broker: pgmb.Broker) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q")
    def handle(payload: int) -> None:
        raise ZeroDivisionError

    broker.publish("a", 1)
    with pytest.raises(ZeroDivisionError):
        drain(app, raises=True)
    (status,) = broker.queue_status()
    assert (status.retries, status.leases) == (1, 0)


def test_batches_middleware_lifespan_and_timeouts(dsn: str, broker: pgmb.Broker) -> None:
    around: list[str] = []

    @asynccontextmanager
    async def lifespan(app: pgmb.App) -> Any:
        around.append("begin")
        yield
        around.append("end")

    app = pgmb.App(dsn, lifespan=lifespan)
    batches: list[list[int]] = []

    @app.middleware
    async def counting(delivery: Any, call_next: Any) -> None:
        around.append("around")
        await call_next(delivery)

    @app.on("n", queue="batches", batch=3)
    async def many(numbers: list[int]) -> None:
        batches.append(numbers)

    @app.on("slow", queue="slow", timeout=0.05)
    async def slow(payload: int) -> None:
        import asyncio

        await asyncio.sleep(60)

    broker.publish_many("n", range(7))
    broker.publish("slow", 1)
    drained = drain(app)
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert around == ["begin", *["around"] * 4, "end"]
    (error,) = drained.errors
    assert isinstance(error, TimeoutError)


def test_functions_take_what_is_in_a_queue(broker: pgmb.Broker) -> None:
    broker.create_queue("q", ["a.*"])
    broker.publish("a.b", {"number": 1})
    seen: list[Order] = []

    def handle(order: Order) -> None:
        seen.append(order)

    assert drain(handle, "q", broker=broker).handled == 1
    assert seen == [Order(1)]
    with pytest.raises(pgmb.NotFound):
        drain(handle, "nothing", broker=broker)
    with pytest.raises(pgmb.InvalidArgument, match="queue="):
        drain(handle, broker=broker)
    with pytest.raises(pgmb.InvalidArgument, match="broker="):
        drain(handle, "q")
    with pytest.raises(pgmb.InvalidArgument, match="no handlers"):
        drain([], "q", broker=broker)
    with pytest.raises(pgmb.InvalidArgument, match="no handlers"):
        drain(pgmb.App(), broker=broker)


def test_a_handler_that_feeds_itself_does_not_run_for_ever(dsn: str, broker: pgmb.Broker) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q")
    def again(payload: int) -> None:
        app.publish("a", payload + 1)

    broker.publish("a", 0)
    with pytest.raises(RuntimeError, match="25 deliveries"):
        drain(app, limit=25)


def test_an_ack_in_the_handlers_own_transaction(dsn: str, broker: pgmb.Broker, clock: FrozenClock) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q")
    def handle(event: pgmb.Delivery[int]) -> None:
        with psycopg.connect(dsn) as conn:
            event.ack(conn=conn)

    broker.publish("a", 1)
    assert drain(app).handled == 1
    clock.advance(3600)
    assert drain(app).deliveries == []


def test_ordered_queues_keep_their_order(dsn: str, broker: pgmb.Broker, clock: FrozenClock) -> None:
    app = pgmb.App(dsn)
    app.queue("q", ordered=True)
    seen: list[int] = []

    @app.on("a", queue="q", retry=60)
    def handle(event: pgmb.Delivery[int]) -> None:
        if event.payload == 1 and event.attempt == 1:
            raise RuntimeError
        seen.append(event.payload)

    for n in range(4):
        broker.publish("a", n, key="k" if n else "other")
    drain(app)
    assert seen == [0]
    clock.advance(60)
    drain(app)
    assert seen == [0, 1, 2, 3]


async def test_inside_an_event_loop(dsn: str) -> None:
    app = pgmb.App("host=/nonexistent")
    seen: list[int] = []

    @app.on("a", queue="q")
    async def handle(payload: int) -> None:
        seen.append(payload)
        if payload < 3:
            await app.apublish("a", payload + 1)

    async with aconnected(app, dsn):
        await app.apublish("a", 0)
        assert (await adrain(app)).handled == 4
        with pytest.raises(RuntimeError, match="await adrain"):
            drain(app)
    assert seen == [0, 1, 2, 3]
    assert app.dsn == "host=/nonexistent"


def test_an_app_is_put_on_another_database_for_a_while(dsn: str) -> None:
    app = pgmb.App("host=/nonexistent")
    with connected(app, dsn):
        app.publish("a", 1)
    assert_published(dsn, "a", 1)
    with pytest.raises(psycopg.OperationalError):
        app.publish("a", 1)
