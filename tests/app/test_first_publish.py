"""What an app publishes before a worker was ever started waits for it."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import psycopg
import pydantic
import pytest
from psycopg.conninfo import make_conninfo

import pgmb
from harness.states import queue_names


def an_app(dsn: str, **options: Any) -> pgmb.App:
    app = pgmb.App(dsn, **options)

    @app.on("order.*", queue="billing", max_attempts=3)
    def bill(order: int) -> None: ...

    return app


def received(dsn: str, queue: str) -> list[Any]:
    with pgmb.connect(dsn) as broker:
        return [event.payload for event in broker.receive(queue, max=10)]


def test_publish_creates_the_queues_first(dsn: str) -> None:
    app = an_app(dsn)
    app.publish("order.paid", 1)
    app.close()
    assert received(dsn, "billing") == [1]


async def test_apublish_creates_the_queues_first(dsn: str) -> None:
    app = an_app(dsn)
    await app.apublish("order.paid", 1)
    await app.aclose()
    assert received(dsn, "billing") == [1]


async def test_the_first_calls_at_once_share_one_pool(dsn: str, db: psycopg.Connection[Any]) -> None:
    app = pgmb.App(dsn, max_size=2, application_name="first calls")
    await asyncio.gather(*(app.apublish("order.paid", n) for n in range(10)))
    opened = "select count(*) from pg_stat_activity where application_name = 'first calls'"
    (connections,) = db.execute(opened).fetchone() or (None,)
    await app.aclose()
    assert connections in {1, 2}


def test_a_publish_that_rolls_back_leaves_the_queue_without_the_event(dsn: str) -> None:
    app = an_app(dsn)
    with app.broker.connection() as conn, conn.transaction(force_rollback=True):
        app.publish("order.paid", 1, conn=conn)
    app.publish("order.paid", 2)
    app.close()
    assert received(dsn, "billing") == [2]


def test_one_connection_is_enough(dsn: str) -> None:
    app = an_app(dsn, max_size=1)
    with app.broker.connection() as conn, conn.transaction():
        app.publish("order.paid", 1, conn=conn)
    app.close()
    assert received(dsn, "billing") == [1]


def test_a_handler_that_comes_later_gets_its_queue_too(dsn: str) -> None:
    app = an_app(dsn)
    app.publish("order.paid", 1)
    app.on("order.paid", queue="receipts")(lambda order: None)
    app.publish("order.paid", 2)
    app.close()
    assert received(dsn, "billing") == [1, 2]
    assert received(dsn, "receipts") == [2]


def test_a_queue_that_differs_is_left_to_the_worker(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["#"])
        app = an_app(dsn)
        app.publish("order.paid", 1)
        app.close()
        assert [status.patterns for status in broker.queue_status()] == [["#"]]


def test_a_role_that_may_only_publish_publishes(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("create role shop_front login")
    try:
        db.execute("select pgmb.grant_publish('main', 'shop_front')")
        app = an_app(make_conninfo(dsn, user="shop_front"))
        app.publish("order.paid", 1)
        app.close()
        assert queue_names(db) == []
    finally:
        db.execute("drop owned by shop_front")
        db.execute("drop role shop_front")


def test_on_without_parentheses_is_refused() -> None:
    app = pgmb.App("")
    with pytest.raises(pgmb.InvalidArgument, match="invalid pattern") as refused:
        app.on(print)  # type: ignore[call-overload]
    assert refused.value.hint == 'Name the topics: @app.on("order.*").'


def test_a_setting_that_no_queue_has_is_refused() -> None:
    app = pgmb.App("")
    with pytest.raises(pgmb.InvalidArgument, match="unknown queue setting 'max_attemps'") as refused:
        app.queue("billing", max_attemps=3)  # type: ignore[call-arg]
    assert "max_attempts" in str(refused.value.hint)


class Order(pydantic.BaseModel):
    number: int
    due: datetime.date


def test_a_pydantic_model_is_published_as_its_json(dsn: str) -> None:
    app = an_app(dsn)
    app.publish("order.paid", Order(number=1, due=datetime.date(2030, 1, 2)))
    app.broker.publish_many("order.paid", [Order(number=2, due=datetime.date(2030, 1, 2))])
    app.close()
    assert received(dsn, "billing") == [{"number": number, "due": "2030-01-02"} for number in (1, 2)]


@pytest.mark.parametrize("payload", [object(), {"call": print}, [Order]])
def test_a_payload_without_a_form_in_json_is_named(payload: object, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        with pytest.raises(TypeError, match="has no form in JSON; give what has"):
            broker.publish("order.paid", payload)
        with pytest.raises(TypeError, match="has no form in JSON; give what has"):
            broker.publish_many("order.paid", [1, payload])
        assert broker.stream_status()[0].events == 0
