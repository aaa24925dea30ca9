"""What a transaction keeps from others that received, or ticked, and stays open.

Promises: other queues get their delayed events when these are due. A superseded lease takes nothing along.
The second one is not kept yet: the rows that a receive locks stay locked until its transaction ends.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from tests.contract.cast import Cast
from tests.contract.deliveries import Consumer

Connection = psycopg.Connection[Any]

PATIENCE = 4.0
"""How long what one transaction keeps may be missing: it is superseded after a second."""

KEEPS_DUE = pytest.mark.xfail(
    strict=True,
    reason="a receive locks the delayed events that it moves into the log until its transaction ends",
)
KEEPS_ROWS = pytest.mark.xfail(
    strict=True,
    reason="a receive locks the rows of retries and of expired leases until its transaction ends",
)


@pytest.fixture
def held(sessions: Sessions) -> Session:
    """A session whose transaction is open."""
    sessions["held"].run("begin")
    return sessions["held"]


def publish_due(db: Connection, topic: str, events: int) -> None:
    """Publishes delayed events and waits until they are due."""
    for name in range(events):
        db.execute("select pgmb.publish(%s, to_json(%s::int), delay => '50 ms')", [topic, name])
    time.sleep(0.2)


def taken(db: Connection, queue: str, wanted: int) -> set[int]:
    """What a consumer gets that asks again and again, all or those in time."""
    got: set[int] = set()
    deadline = time.monotonic() + PATIENCE
    while len(got) < wanted and time.monotonic() < deadline:
        try:
            rows = db.execute(
                "select lease, payload::text::int from pgmb.receive(%s, 100)", [queue]
            ).fetchall()
        except psycopg.errors.Error as error:
            if error.sqlstate not in ("MB011", "MB013"):
                raise
            rows = []
        if rows:
            got |= {name for _, name in rows}
            db.execute("select pgmb.ack(%s)", [rows[0][0]])
        db.execute("select pgmb.tick()")
        time.sleep(0.05)
    return got


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("select * from pgmb.receive('other')", id="receive"),
        pytest.param("select * from pgmb.receive_any('{other}')", id="receive any"),
        pytest.param("select pgmb.tick()", id="tick"),
        pytest.param("select pgmb.position()", id="position"),
        pytest.param("select * from pgmb.receive('q')", id="receive of the queue", marks=KEEPS_DUE),
    ],
)
def test_an_open_transaction_of_a_consumer_keeps_no_due_event_from_a_queue(
    db: Connection, cast: Cast, call: str
) -> None:
    db.execute("select pgmb.create_queue('q', '{wanted.#}')")
    db.execute("select pgmb.create_queue('other', '{other.#}')")
    publish_due(db, "wanted.one", 5)
    consumer = cast.acting(cast.role("consumer", "pgmb_consumer"))
    consumer.execute("begin")
    consumer.execute(call.encode())
    assert taken(db, "q", 5) == set(range(5))


def test_a_receive_gets_the_due_events_of_its_own_patterns(db: Connection) -> None:
    """Those of others stay for the next tick of an admin, which publishes them all."""
    db.execute("select pgmb.create_queue('q', '{wanted.#}')")
    db.execute("select pgmb.create_queue('named', '{other}')")
    publish_due(db, "other", 3)
    publish_due(db, "wanted.one", 3)
    receive = "select payload::text::int from pgmb.receive(%s)"
    assert db.execute(receive, ["q"]).fetchall() == [], "they are delivered after they are committed"
    assert len(db.execute(receive, ["q"]).fetchall()) == 3
    assert db.execute("select delayed from pgmb.stream_status").fetchall() == [(3,)]
    db.execute("select pgmb.tick()")
    assert db.execute("select delayed from pgmb.stream_status").fetchall() == [(0,)]
    assert len(db.execute(receive, ["named"]).fetchall()) == 3


@KEEPS_ROWS
@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param("", "retry", id="plain, retries"),
        pytest.param("", "expire", id="plain, an expired lease"),
        pytest.param(", ordered => true, shards => 1", "expire", id="ordered, an expired lease"),
        pytest.param(", fair_by => 'key'", "retry", id="fair, retries"),
    ],
)
def test_a_superseded_receive_keeps_nothing_that_was_due_again(
    db: Connection, sessions: Sessions, held: Session, options: str, how: str
) -> None:
    db.execute(f"select pgmb.create_queue('q', backoff_base => '0'{options})".encode())
    one = Consumer(sessions["one"])
    for name in range(6):
        one.publish(f"k{name % 2}", name)
    if how == "retry":
        one.retry(one.receive(4))
    else:
        one.receive(4, "50 ms")
        time.sleep(0.2)
    held.run("select * from pgmb.receive('q', 2)")
    assert taken(db, "q", 6) == set(range(6))
