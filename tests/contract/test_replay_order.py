"""A replay into an ordered queue or endpoint keeps the order of each key, with nothing twice."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import make_due
from tests.contract import endpoints
from tests.contract.deliveries import Consumer
from tests.contract.endpoints import create, publish, receive, refused, settle, value

Connection = psycopg.Connection[Any]

BEGINNING = "2000-01-01"
HOOK = "endpoint/hook"


def moment(db: Connection) -> Any:
    """A time between two events, with a tick, so that a replay finds where to begin."""
    db.execute("select pgmb.tick()")
    return value(db, "select clock_timestamp()")


def post_all(db: Connection, most: int = 1) -> list[int]:
    """What is posted, one lease after another, until nothing is left."""
    posted: list[int] = []
    while value(db, "select pgmb.queue_depth(%s)", HOOK):
        if got := receive(db, HOOK, most):
            posted += got.names
            settle(db, got.lease)
    return posted


def lake_replay(db: Connection, since: str, queue: str = "q", topic: str = "%") -> int:
    """Sends a queue the events between a position and now, as pgmb lake replay does. Returns how many."""
    upto = value(db, "select pgmb.position()::text")
    between = "pgmb.between('main', %s::pgmb.position, %s::pgmb.position)"
    last = value(db, f"select max(seq) from {between}", since, upto)
    replay = value(
        db,
        "select pgmb.start_replay('main', %s::pgmb.position, %s::pgmb.position, %s, %s)",
        *(since, upto, last, queue),
    )
    from_seq = value(db, "select seq from pgmb.describe_replays() where id = %s", replay)
    sent = value(
        db,
        "select pgmb.replay_events(%s, %s, %s, coalesce(array_agg(seq), '{}'), array_agg(id),"
        " array_agg(topic), array_agg(key), array_agg(payload::text), array_agg(headers::text),"
        " array_agg(published_at))"
        f" from {between} where topic like %s",
        *(replay, from_seq, last, since, upto, topic),
    )
    assert value(db, "select events from pgmb.describe_replays() where id = %s", replay) == sent
    db.execute("select pgmb.end_replay(%s)", [replay])
    assert isinstance(sent, int)
    return sent


def position(db: Connection) -> str:
    return str(value(db, "select pgmb.position()::text"))


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    return Consumer(sessions["one"], patience=0.12)


def test_a_replay_sends_an_ordered_endpoint_nothing_that_waits_ahead_of_it(db: Connection) -> None:
    create(db, "hook", ordered=True)
    publish(db, 1, 2, 3, key="k")
    since = moment(db)
    publish(db, 4, 5, key="k")
    assert value(db, "select pgmb.replay('hook', %s)", since) == 0
    assert post_all(db) == [1, 2, 3, 4, 5]


def test_a_replay_sends_an_ordered_endpoint_what_it_has_done_before_what_waits(db: Connection) -> None:
    create(db, "hook", ordered=True)
    publish(db, 1, 2, key="k")
    post_all(db)
    publish(db, 3, key="k")
    assert value(db, "select pgmb.replay('hook', %s)", BEGINNING) == 2
    assert post_all(db) == [1, 2, 3]


def test_a_replay_leaves_an_ordered_endpoint_what_is_on_its_way(db: Connection) -> None:
    """If the request fails, the event comes again in its place."""
    hook = create(db, "hook", ordered=True, batch=5)
    publish(db, 1, key="k")
    since = moment(db)
    publish(db, 2, key="k")
    got = receive(db, HOOK, 5)
    assert got.names == [1, 2]
    assert value(db, "select pgmb.replay('hook', %s)", since) == 0
    settle(db, got.lease, None, [(seq, hook, "0", "down", True, False) for seq in got.seqs(1, 2)])
    make_due(db)
    again = receive(db, HOOK, 5)
    assert value(db, "select pgmb.replay('hook', %s)", since) == 0, "on its way for the second time"
    settle(db, again.lease)
    assert [*again.names, *post_all(db)] == [1, 2]


def test_resent_events_keep_the_order_of_an_ordered_endpoint(db: Connection) -> None:
    create(db, "hook", "{a}", ordered=True)
    publish(db, 1, 2, topic="a", key="k")
    publish(db, 3, topic="b", key="k")
    publish(db, 4, topic="b", key="l")
    found = dict(
        db.execute(
            "select payload::text::int, id"
            " from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main'))"
        ).fetchall()
    )
    resend = "select pgmb.resend('hook', %s::uuid[])"
    assert value(db, resend, [found[2]]) == 0, "it comes after 1"
    with refused("MB013"):
        value(db, resend, [found[3]])
    assert value(db, resend, [found[4]]) == 1, "nothing of its key waits"
    assert sorted(post_all(db)) == [1, 2, 4]
    assert value(db, resend, [found[2], found[3]]) == 2
    assert post_all(db) == [2, 3]


@pytest.mark.parametrize("shards", [1, 4])
def test_a_lake_replay_sends_an_ordered_queue_nothing_that_comes_anyway(
    db: Connection, one: Consumer, shards: int
) -> None:
    db.execute("select pgmb.create_queue('q', ordered => true, shards => %s)", [shards])
    beginning = position(db)
    one.publish("a", 1, 2)
    one.publish("b", 3)
    one.take_all()
    one.publish("a", 4)
    middle = position(db)
    one.publish("a", 5)
    one.publish("b", 6)
    assert lake_replay(db, middle) == 0
    assert lake_replay(db, beginning) == 3
    assert lake_replay(db, beginning) == 0, "they wait already"
    taken = one.take_all(1)
    assert [name for name in taken if name in (1, 2, 4, 5)] == [1, 2, 4, 5]
    assert [name for name in taken if name in (3, 6)] == [3, 6]


def test_a_lake_replay_leaves_an_ordered_queue_what_a_lease_holds(db: Connection, one: Consumer) -> None:
    db.execute("select pgmb.create_queue('q', ordered => true, shards => 1)")
    one.publish("a", 1)
    middle = position(db)
    one.publish("a", 2, 3)
    got = one.receive(2)
    assert lake_replay(db, middle) == 0
    one.retry(got)
    assert lake_replay(db, middle) == 0, "they wait to be tried again"
    assert one.take_all(1) == [1, 2, 3]


def test_a_replay_of_other_topics_does_not_overtake_what_waits_of_its_key(
    db: Connection, one: Consumer
) -> None:
    db.execute("select pgmb.create_queue('q', '{a}', ordered => true, shards => 1)")
    one.publish("k", 1, 2, topic="a")
    middle = position(db)
    one.publish("k", 3, topic="b")
    with refused("MB013"):
        lake_replay(db, middle)
    assert one.take_all(1) == [1, 2]
    replay = value(db, "select id from pgmb.describe_replays() where ended_at is null")
    db.execute("select pgmb.end_replay(%s)", [replay])
    assert lake_replay(db, middle) == 1
    assert one.take_all(1) == [3]


def test_a_replay_sends_an_unordered_queue_what_waits_as_well(db: Connection, one: Consumer) -> None:
    db.execute("select pgmb.create_queue('q')")
    create(db, "hook", batch=5)
    beginning = position(db)
    since = moment(db)
    endpoints.publish(db, 1, 2, key="k")
    assert lake_replay(db, beginning) == 2
    assert value(db, "select pgmb.replay('hook', %s)", since) == 2
    assert sorted(one.take_all()) == [1, 1, 2, 2]
    assert sorted(post_all(db, 5)) == [1, 1, 2, 2]


def test_a_lease_of_retries_and_redriven_events_is_in_the_order_of_the_log(
    db: psycopg.Connection[Any],
) -> None:
    db.execute("select pgmb.create_queue('q', backoff_base => '0')")
    db.execute("select pgmb.publish('t', n::text::json) from generate_series(1, 3) n")
    rows = db.execute("select lease, seq from pgmb.receive('q')").fetchall()
    lease, (first, second, third) = rows[0][0], [seq for _, seq in rows]
    db.execute("select pgmb.bury(%s, %s, 'no')", [lease, [second, third]])
    db.execute("select pgmb.retry(%s, %s, '0 s')", [lease, [first]])
    db.execute("select pgmb.redrive('q')")
    again = db.execute("select seq from pgmb.receive('q')").fetchall()
    assert [seq for (seq,) in again] == [first, second, third]
