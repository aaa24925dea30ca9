"""What was published, and how it is said that something else was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb.testing import assert_published, published
from tests.conftest import Connect


@dataclass
class Paid:
    order: int


def test_events_are_found_by_pattern_payload_key_and_count(broker: pgmb.Broker) -> None:
    given = broker.publish("order.paid", Paid(42), key="k")
    broker.publish("order.paid", Paid(43))
    broker.publish("order.made", {"order": 42})
    (found,) = assert_published(broker, "order.paid", Paid(42), key="k")
    assert (found.id, found.payload) == (given, {"order": 42})
    assert_published(broker, "order.*", {"order": 42}, count=2)
    assert_published(broker, "order.#", matching=lambda payload: payload["order"] > 42, count=1)
    assert_published(broker, "nothing", count=0)
    assert_published(broker, "order.paid", key=None)
    assert [event.topic for event in published(broker)] == ["order.paid", "order.paid", "order.made"]


def test_only_what_came_since_a_position_counts(broker: pgmb.Broker) -> None:
    broker.publish("a", 1)
    since = broker.position()
    assert_published(broker, "a", count=0, since=since)
    broker.publish("a", 2)
    assert [event.payload for event in published(broker, "a", since=since)] == [2]


def test_the_failure_shows_what_was_published_instead(broker: pgmb.Broker) -> None:
    with pytest.raises(AssertionError, match="nothing was published"):
        assert_published(broker, "order.paid")
    broker.publish("order.paid", {"order": 41}, key="k")
    broker.publish("order.paid", {"order": 1}, delay=60)
    with pytest.raises(AssertionError) as caught:
        assert_published(broker, "order.paid", {"order": 42})
    lines = str(caught.value).splitlines()
    wanted = "of topic 'order.paid' with payload {\"order\":42} in stream 'main'"
    assert lines[0] == f"expected at least one event {wanted}, found 0"
    assert "  order.paid key='k' {\"order\":41}" in lines
    assert lines[-1].startswith("waiting for its time: order.paid, due in ")
    with pytest.raises(AssertionError, match=r"exactly 2 events of topic 'order.paid'.*found 1"):
        assert_published(broker, "order.paid", count=2)


def test_many_events_do_not_make_a_long_message(broker: pgmb.Broker) -> None:
    broker.publish_many("a", ["x" * 1000 for _ in range(100)])
    with pytest.raises(AssertionError) as caught:
        assert_published(broker, "b")
    assert "80 before these" in str(caught.value)
    assert caught.traceback.filter(caught)[-1].path == Path(__file__), "pytest shows the caller's line"
    assert len(str(caught.value)) < 10_000


def test_a_transaction_sees_its_own_events_before_they_are_committed(
    broker: pgmb.Broker, connect: Connect
) -> None:
    own = connect(autocommit=False)
    broker.publish("a", 1, conn=own)
    assert_published(broker, "a", 1, conn=own)
    assert_published(broker, "a", count=0)
    own.rollback()
    assert_published(broker, "a", count=0)


def test_sqlalchemys_session_sees_its_own_events(broker: pgmb.Broker, dsn: str) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with Session(engine) as session:
        broker.publish("a", 1, conn=session)
        assert_published(broker, "a", 1, conn=session)
    engine.dispose()
    assert_published(broker, "a", count=0)


async def test_any_kind_of_broker_will_do(dsn: str) -> None:
    app = pgmb.App(dsn)
    async with await pgmb.aconnect(dsn) as broker:
        await broker.publish("a", 1)
        for source in (broker, app, dsn):
            assert_published(source, "a", 1)
    with pytest.raises(pgmb.InvalidArgument, match="not a broker"):
        published(object())  # type: ignore[arg-type]


def test_no_such_stream(broker: pgmb.Broker) -> None:
    with pytest.raises(pgmb.NotFound):
        published(broker, stream="nothing")


def test_a_broker_with_options_of_its_own(dsn: str, db: psycopg.Connection[Any]) -> None:
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    parts: dict[str, Any] = dict(conninfo_to_dict(dsn))
    name = parts.pop("dbname")
    with pgmb.connect(make_conninfo("", **parts), dbname=name, application_name="x") as broker:
        broker.publish("a", 1)
        assert_published(broker, "a", 1)
