"""What holds for all calls: durations as text, checks of arguments, errors, leases in `with`."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import psycopg
import psycopg_pool
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import pgmb
from harness.states.leases import leases_in_flight
from pgmb._core import durations
from pgmb.errors import BrokerClosed, InvalidArgument, NoConnection
from pgmb.outbox import is_asynchronous


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15 minutes", 900),
        ("5m", 300),
        ("1h30m", 5400),
        ("1 hour, 30 minutes", 5400),
        ("2 days", 172_800),
        ("1 week", 604_800),
        ("250 milliseconds", 0.25),
        ("90", 90),
        (90, 90),
        (timedelta(seconds=90), 90),
    ],
)
def test_a_duration_is_a_timedelta_seconds_or_text(text: Any, seconds: float) -> None:
    assert durations.seconds(text) == seconds
    assert durations.of(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("wrong", ["", "soon", "5 parsecs", "m", "5 5", "1h 30", None, [], "9" * 40 + "d"])
def test_other_durations_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a duration"):
        durations.of(wrong)


def test_calls_and_apps_take_durations_as_text(dsn: str, db: psycopg.Connection[Any]) -> None:
    app = pgmb.App(dsn, grace="5s", unhandled_for="1 hour")

    @app.on("a", queue="q", timeout="2 seconds", retry=["1 minute", "1h"])
    async def handle(payload: object) -> None:
        raise ValueError

    app.queue("q", lease_for="5m", ttl="1 day")
    app.queue("q", lease_for=300)
    with pgmb.connect(dsn, max_wait="10s") as broker:
        app.publish("a", 1)
        broker.publish("a", 2, delay="15 minutes", dedup_key="k", dedup_for="2 days")
        assert app.handle("q") == 1
        with broker.publisher(flush_every="10ms") as publisher:
            publisher.enqueue("a", 3, timeout="1s")
            publisher.flush("10s")
    app.close()
    due = db.execute("select due_at - now() from pgmb.delayed").fetchone()
    assert due is not None
    assert timedelta(minutes=14) < due[0] <= timedelta(minutes=15)
    for wrong in ({"timeout": "0s"}, {"retry": "soon"}, {"retry": ["-5"]}):
        with pytest.raises(InvalidArgument):
            app.on("a", queue="other", **wrong)(handle)


@pytest.mark.parametrize("text", ["text", b"bytes", bytearray(b"x"), {"a": 1}])
def test_publish_many_refuses_what_is_iterated_by_mistake(dsn: str, text: Any) -> None:
    with pgmb.connect(dsn) as broker:
        with pytest.raises(InvalidArgument, match="payloads must be a list"):
            broker.publish_many("a", text)
        if not isinstance(text, str):
            with pytest.raises(InvalidArgument, match="events must be a list"):
                broker.publish_many(text)
        with pytest.raises(InvalidArgument, match="events must be NewEvent, got"):
            broker.publish_many([pgmb.NewEvent("a", 1), text])


@pytest.mark.parametrize(
    "wrong", [{"topic": 5}, {"topic": None}, {"topic": "\ud800"}, {"key": b"k"}, {"key": 5}, {"dedup_key": 1}]
)
def test_every_way_to_publish_checks_the_same(dsn: str, wrong: dict[str, Any]) -> None:
    event: dict[str, Any] = {"topic": "a", "payload": 1, **wrong}
    with pgmb.connect(dsn) as broker, broker.publisher() as publisher, broker.connection() as conn:
        for call in (
            lambda: broker.publish(**event),
            lambda: broker.publish(**event, delay=1),
            lambda: broker.publish(**event, conn=conn),
            lambda: publisher.enqueue(**event),
            lambda: broker.publish_many([pgmb.NewEvent(**event)]),
        ):
            with pytest.raises(
                (InvalidArgument, UnicodeEncodeError), match=r"must be a string|surrogates|needs a topic"
            ):
                call()


def test_a_closed_broker_and_an_empty_pool_raise_pgmbs_errors(dsn: str) -> None:
    broker = pgmb.connect(dsn, max_size=1, max_wait=0.1)
    with broker.connection(), pytest.raises(NoConnection, match="no connection within") as empty:
        broker.publish("a", 1)
    assert isinstance(empty.value, psycopg_pool.PoolTimeout)
    assert empty.value.hint is not None
    broker.close()
    with pytest.raises(BrokerClosed, match="the broker is closed") as closed:
        broker.publish("a", 1)
    assert isinstance(closed.value, psycopg_pool.PoolClosed)


async def test_a_lease_in_with_is_acked_or_retried(dsn: str, db: psycopg.Connection[Any]) -> None:
    def fail(lease: pgmb.Lease) -> None:
        with lease:
            raise ValueError("not now")

    with pgmb.connect(dsn) as broker:
        broker.create_queue("q")
        with broker.receive("q") as lease:
            assert not lease
        broker.publish_many("a", [1, 2])
        with broker.receive("q", 1) as lease:
            assert [event.payload for event in lease] == [1]
        assert leases_in_flight(db) == 0
        with pytest.raises(ValueError, match="not now"):
            fail(broker.receive("q"))
        assert [status.retries for status in broker.queue_status()] == [1]
        broker.publish_many("a", [3, 4])
        with broker.receive("q") as lease:
            lease.bury(lease.events[0])
        assert db.execute("select count(*) from pgmb.dead").fetchone() == (1,)
    async with await pgmb.aconnect(dsn) as abroker:
        await abroker.publish("a", 5)
        async with await abroker.receive("q") as alease:
            assert [event.payload for event in alease] == [5]
        assert not await abroker.receive("q")


class _Session(AsyncSession):
    """As SQLModel derives its own."""


async def test_subclasses_of_asynchronous_sessions_are_asynchronous() -> None:
    engine = create_async_engine("postgresql+psycopg://nowhere/none")
    assert is_asynchronous(_Session(engine))
    assert is_asynchronous(engine.connect())
    assert not is_asynchronous(object())


async def test_handlers_of_one_queue_share_no_payload(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[object]()

    @app.on("a", queue="q")
    async def first(event: pgmb.Event) -> None:
        event.payload["spoiled"] = True

    @app.on("a", queue="q")
    async def second(event: pgmb.Event) -> None:
        seen.append(event.payload)

    @app.on("a", queue="q")
    async def third(delivery: pgmb.Delivery[Any]) -> None:
        seen.append(delivery.event.payload)

    await app.apublish("a", {"a": 1})
    assert await app.ahandle("q") == 1
    await app.aclose()
    assert seen == [{"a": 1}, {"a": 1}]


def test_an_apps_publish_has_the_signature_of_a_brokers() -> None:
    assert list(inspect.signature(pgmb.App("").publish).parameters) == [
        name for name in inspect.signature(pgmb.Broker.publish).parameters if name != "self"
    ]
    assert "queues ['q']" in repr(_with_queue())


def _with_queue() -> pgmb.App:
    app = pgmb.App("")
    app.queue("q")
    return app
