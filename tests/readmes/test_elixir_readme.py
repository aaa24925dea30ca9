"""What the README of Elixir's reference implementation shows, in Python: docs/howto/from-elixir.md."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import pgmb
from harness.states import make_due, retries
from harness.waiting import until
from pgmb._core.patterns import matches
from tests.app.stage import settled, working

QUEUE = "my_queue"


@pytest.fixture
def broker(dsn: str) -> Any:
    with pgmb.connect(dsn) as connected:
        connected.create_stream(QUEUE)
        connected.create_queue(QUEUE, stream=QUEUE)
        yield connected


def an_app(dsn: str, **settings: Any) -> pgmb.App:
    app = pgmb.App(dsn)
    app.queue(QUEUE, stream=QUEUE, **settings)
    return app


def backoff_ms(attempt: int) -> int:
    base = 2 ** (attempt - 1) * 5 - 5
    jitter = random.randint(-base, base) // 20
    return base + jitter


# -- broadcast


def test_a_message_is_there_when_the_transaction_commits(broker: pgmb.Broker, dsn: str) -> None:
    with psycopg.connect(dsn) as conn, conn.transaction():
        broker.publish("Example.Event", {"one": 1}, headers={"schema_version": 1}, stream=QUEUE, conn=conn)
        assert not broker.receive(QUEUE)
    (event,) = broker.receive(QUEUE)
    assert (event.topic, event.headers, event.payload) == ("Example.Event", {"schema_version": 1}, {"one": 1})


def test_rolled_back_it_was_never_there(broker: pgmb.Broker, dsn: str) -> None:
    with psycopg.connect(dsn) as conn, conn.transaction(force_rollback=True):
        broker.publish("Example.Event", {"one": 1}, stream=QUEUE, conn=conn)
        broker.publish("Example.Event", {"one": 2}, stream=QUEUE, delay=60, conn=conn)
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with Session(engine) as session:
        broker.publish("Example.Event", {"one": 3}, stream=QUEUE, conn=session)
        session.rollback()
        broker.publish("Example.Event", {"one": 4}, stream=QUEUE, conn=session)
        session.commit()
    engine.dispose()
    assert [event.payload["one"] for event in broker.receive(QUEUE)] == [4]
    assert [status.delayed for status in broker.stream_status() if status.stream == QUEUE] == [0]


def test_it_is_for_the_queue_that_was_named_and_no_other(broker: pgmb.Broker) -> None:
    broker.create_stream("invoices")
    broker.create_queue("invoices", stream="invoices")
    broker.create_queue("global", ["#"])
    broker.publish("Example.Event", 1, stream=QUEUE)
    assert [len(broker.receive(queue)) for queue in (QUEUE, "invoices", "global")] == [1, 0, 0]


def test_where_there_are_many_queues_the_name_is_the_first_word(broker: pgmb.Broker) -> None:
    for name in ("one", "two"):
        broker.create_queue(name, [f"{name}.#"])
    broker.publish("one.Example.Event", 1)
    assert [len(broker.receive(queue)) for queue in ("one", "two")] == [1, 0]


# -- processing


def test_a_batch_is_processed_by_hand(broker: pgmb.Broker, dsn: str) -> None:
    app, seen = an_app(dsn), list[Any]()
    app.on("Example.*", queue=QUEUE)(seen.append)
    broker.publish_many("Example.Event", [{"one": 1}, {"one": 2}, {"one": 3}], stream=QUEUE)
    assert [app.handle(QUEUE), app.handle(QUEUE, max=10), app.handle(QUEUE)] == [1, 2, 0]
    assert seen == [{"one": 1}, {"one": 2}, {"one": 3}]


def test_a_batch_in_one_transaction_is_done_or_not_done(
    broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    db.execute("create table done (number int)")

    def process(handle: Callable[[pgmb.Event, Any], None]) -> int:
        lease = broker.receive(QUEUE, max=10)
        try:
            with broker.connection() as conn, conn.transaction():
                for event in lease:
                    handle(event, conn)
                lease.ack(conn=conn)
        except Exception as error:
            lease.retry(after=0, error=str(error))
            raise
        return len(lease)

    def insert(event: pgmb.Event, conn: Any) -> None:
        conn.execute("insert into done values (%s)", [event.payload])

    def fail_at_two(event: pgmb.Event, conn: Any) -> None:
        insert(event, conn)
        if event.payload == 2:
            raise ValueError("two")

    broker.publish_many("Example.Event", [1, 2, 3], stream=QUEUE)
    with pytest.raises(ValueError, match="two"):
        process(fail_at_two)
    assert db.execute("select count(*) from done").fetchone() == (0,)
    handled = 0
    while handled < 3:
        handled += process(insert)
    assert db.execute("select array_agg(number order by number) from done").fetchone() == ([1, 2, 3],)
    assert process(insert) == 0


async def test_a_processor_waits_for_messages(dsn: str) -> None:
    app, seen = an_app(dsn), list[str]()

    @app.on("ExampleUsage.Events.Greeting", queue=QUEUE)
    async def greet(event: pgmb.Delivery[dict[str, str]]) -> None:
        seen.append(event.payload["greeting"])

    async with working(app) as broker:
        for greeting in ("hello", "again", "and again"):
            await broker.publish("ExampleUsage.Events.Greeting", {"greeting": greeting}, stream=QUEUE)
            await until(lambda: seen[-1:] == [greeting])  # noqa: B023
    assert seen == ["hello", "again", "and again"]


def test_a_handler_tells_versions_apart(broker: pgmb.Broker, dsn: str) -> None:
    app, seen = an_app(dsn), list[tuple[int, str]]()

    @app.on("Users.Events.Renamed", queue=QUEUE)
    def rename(event: pgmb.Delivery[dict[str, str]]) -> None:
        match event.headers.get("schema_version"), event.payload:
            case 1, {"name": name}:
                seen.append((1, name))
            case 2, {"first_name": name}:
                seen.append((2, name))
            case version, _:
                raise pgmb.Reject(f"schema version {version} is not known here")

    for version, payload in ((1, {"name": "Ada"}), (2, {"first_name": "Grace"}), (3, {}), (1, {})):
        broker.publish("Users.Events.Renamed", payload, headers={"schema_version": version}, stream=QUEUE)
    assert app.handle(QUEUE, max=10) == 4
    assert seen == [(1, "Ada"), (2, "Grace")]
    assert [letter.error for letter in broker.dead_letters(QUEUE)] == [
        "schema version 3 is not known here",
        "schema version 1 is not known here",
    ]


# -- routing


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("One.Two.Three", True),
        ("*.Two.Three", True),
        ("One.*.Three", True),
        ("One.Two.*", True),
        ("*.*.*", True),
        ("One.Two", False),
        ("One.Two.Other", False),
        ("*", False),
        ("*.One.Two.Three", False),
        ("One.Two.Three.*", False),
        ("One.Two.Three.Four", False),
        ("one.two.three", False),
    ],
)
def test_wildcards_mean_the_same(pattern: str, expected: bool, db: psycopg.Connection[Any]) -> None:
    assert matches(pattern, "One.Two.Three") is expected
    db.execute("select pgmb.create_queue('q', array[%s])", [pattern])
    db.execute("select pgmb.publish('One.Two.Three', '1')")
    received = db.execute("select count(*) from pgmb.receive('q')").fetchone()
    assert received == (int(expected),)


def test_hash_is_what_they_have_not(broker: pgmb.Broker) -> None:
    topics = ["Shop.Events.Paid", "Shop.Billing.Events.Paid", "Shop.Events"]
    found = {
        pattern: [topic for topic in topics if matches(pattern, topic)]
        for pattern in ("*.Events.*", "#.Events.*", "Shop.#")
    }
    assert found == {"*.Events.*": topics[:1], "#.Events.*": topics[:2], "Shop.#": topics}
    with pytest.raises(pgmb.InvalidArgument, match="invalid pattern"):
        broker.create_queue("part", ["Shop.Ev*"])


def test_a_static_routing_table(broker: pgmb.Broker, dsn: str) -> None:
    handled, logged = list[str](), list[str]()

    def handle_message(event: pgmb.Delivery[Any]) -> None:
        handled.append(event.topic)

    def log_event(event: pgmb.Delivery[Any]) -> None:
        logged.append(event.topic)

    broker.bind(QUEUE, ["MyContext.Commands.*", "*.Events.*"])
    app = an_app(dsn)
    for function, types in (
        (handle_message, ["MyContext.Commands.*", "AnotherContext.Events.*"]),
        (log_event, ["*.Events.*"]),
    ):
        app.on(*types, queue=QUEUE)(function)
    command, both, event, nobody = (
        "MyContext.Commands.Pay",
        "AnotherContext.Events.Paid",
        "MyContext.Events.Paid",
        "MyContext.Queries.Orders",
    )
    broker.publish_many([pgmb.NewEvent(topic, {}) for topic in (command, both, event, nobody)], stream=QUEUE)
    assert app.handle(QUEUE, max=10) == 3
    assert (handled, logged) == ([command, both], [both, event])


def test_a_routing_of_ones_own(broker: pgmb.Broker, dsn: str) -> None:
    app, seen = an_app(dsn), list[Any]()
    routes: dict[str, Callable[[Any], None]] = {"Pay": lambda payload: seen.append(("pay", payload))}

    @app.on("#", queue=QUEUE)
    def route(event: pgmb.Delivery[Any]) -> None:
        routes[event.topic.rpartition(".")[2]](event.payload)

    broker.publish("MyContext.Commands.Pay", 1, stream=QUEUE)
    assert app.handle(QUEUE) == 1
    assert seen == [("pay", 1)]


# -- failing


def test_a_failed_message_may_be_tried_again_at_once(broker: pgmb.Broker, dsn: str) -> None:
    app, attempts = an_app(dsn, retry=0, max_attempts=1_000_000_000), list[int]()

    @app.on("#", queue=QUEUE)
    def handle(event: pgmb.Delivery[Any]) -> None:
        attempts.append(event.attempt)
        if event.attempt < 15:
            raise ConnectionError("not yet")

    broker.publish("Example.Event", 1, stream=QUEUE)

    async def work() -> None:
        async with working(app) as connected:
            await until(lambda: len(attempts) == 15)
            await until(lambda: settled(connected, QUEUE))

    asyncio.run(work())
    assert attempts == list(range(1, 16))
    assert broker.dead_letters(QUEUE) == []


def test_the_curve_decides_when(broker: pgmb.Broker, dsn: str, db: psycopg.Connection[Any]) -> None:
    waits: list[timedelta] = []

    def curve(attempt: int) -> timedelta:
        # So many attempts on that each wait is long enough to be looked at.
        waits.append(timedelta(milliseconds=backoff_ms(attempt + 14)))
        return waits[-1]

    app = an_app(dsn, retry=curve)

    @app.on("#", queue=QUEUE)
    def handle(event: pgmb.Delivery[Any]) -> None:
        raise ConnectionError(f"attempt {event.attempt}")

    def clock() -> datetime:
        ((now,),) = db.execute("select clock_timestamp()").fetchall()
        assert isinstance(now, datetime)
        return now

    broker.publish("Example.Event", 1, stream=QUEUE)
    for attempt in range(1, 4):
        before = clock()
        assert app.handle(QUEUE) == 1
        (waiting,) = retries(db)
        assert waiting.due_at is not None
        assert before + waits[-1] <= waiting.due_at <= clock() + waits[-1]
        assert waiting.error == f"ConnectionError: attempt {attempt}"
        base = 2 ** (attempt + 13) * 5 - 5
        assert base * 0.95 - 1 <= waits[-1] / timedelta(milliseconds=1) <= base * 1.05
        make_due(db)
    assert len(waits) == 3


def test_the_curve_as_it_stands_there(broker: pgmb.Broker, dsn: str) -> None:
    app = an_app(dsn, retry=lambda attempt: timedelta(milliseconds=backoff_ms(attempt)))
    attempts: list[int] = []

    @app.on("#", queue=QUEUE)
    async def handle(event: pgmb.Delivery[Any]) -> None:
        attempts.append(event.attempt)
        if event.attempt < 5:
            raise ConnectionError("not yet")

    broker.publish("Example.Event", 1, stream=QUEUE)

    async def work() -> None:
        async with working(app):
            await until(lambda: len(attempts) == 5)

    asyncio.run(work())
    assert attempts == [1, 2, 3, 4, 5]
    assert [backoff_ms(1), backoff_ms(1)] == [0, 0]


# -- later


def test_process_after(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    before = datetime.now(UTC)
    broker.publish("Example.Event", 1, stream=QUEUE, delay=timedelta(minutes=5))
    after = datetime.now(UTC)
    at = datetime(2100, 1, 1, tzinfo=UTC)
    broker.publish("Example.Event", 2, stream=QUEUE, at=at)
    broker.publish("Example.Event", 3, stream=QUEUE, at=before - timedelta(seconds=2))
    assert [event.payload for event in broker.receive(QUEUE)] == [3]
    delayed = db.execute("select due_at from pgmb.delayed order by due_at").fetchall()
    ((soon,), (late,)) = delayed
    assert before + timedelta(minutes=5) <= soon <= after + timedelta(minutes=5)
    assert late == at
    db.execute("update pgmb.delayed set due_at = clock_timestamp() where due_at < '2099-01-01'")
    received: list[Any] = []
    while not received:
        received = [event.payload for event in broker.receive(QUEUE)]
    assert received == [1]


# -- several processors


async def test_strict_order_holds_with_several_processors(dsn: str) -> None:
    seen: list[tuple[str, int]] = []
    failed: set[int] = set()

    def one() -> pgmb.App:
        app = an_app(dsn, ordered=True, retry=0.05)

        @app.on("Invoices.*", queue=QUEUE, concurrency=8)
        async def book(event: pgmb.Delivery[int]) -> None:
            await asyncio.sleep(0)
            if event.payload % 7 == 3 and event.payload not in failed:
                failed.add(event.payload)
                raise ConnectionError("not yet")
            seen.append((str(event.key), event.payload))

        return app

    numbers = list(range(40))
    async with working(one()) as broker, working(one()):
        for number in numbers:
            await broker.publish("Invoices.Issued", number, stream=QUEUE, key="all")
        await until(lambda: len(seen) >= len(numbers))
        await until(lambda: settled(broker, QUEUE))
    assert seen == [("all", number) for number in numbers]
    assert failed == {3, 10, 17, 24, 31, 38}
