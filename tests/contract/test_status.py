"""What status tells is right: exact up to a bound, and marked as a bound beyond it."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest

from harness.states import age_leases, kept_claims

Db = psycopg.Connection[Any]


def status(db: Db, columns: str, queue: str = "q") -> Any:
    query = f"select {columns} from pgmb.queue_status where queue = %s"
    return db.execute(cast("Any", query), [queue]).fetchone()


def publish(db: Db, topic: str, count: int) -> None:
    db.execute(
        "select pgmb.publish_many(%s, array(select to_json(n) from generate_series(1, %s) n))", [topic, count]
    )


def test_the_rate_of_a_queue_survives_maintenance(db: Db) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, "a", 100)
    for _ in range(5):
        db.execute("select pgmb.ack((select lease from pgmb.receive('q', 20) limit 1))")
    db.execute("select pgmb.maintain()")
    assert db.execute("select received_per_second from pgmb.queue_status").fetchall() == [(10.0,)]
    age_leases(db, "10 seconds")
    db.execute("select pgmb.maintain()")
    assert db.execute("select received_per_second from pgmb.queue_status").fetchall() == [(0.0,)]
    assert kept_claims(db) == 1, "the queue's position"


@pytest.mark.parametrize(
    "options", ["'{greet}'", 'equals => \'{"topic": "greet"}\'', "filter => '$.topic == \"greet\"'"]
)
def test_what_does_not_match_does_not_wait(db: Db, options: str) -> None:
    db.execute(cast("Any", f"select pgmb.create_queue('q', {options})"))
    publish(db, "order.paid", 500)
    assert status(db, "waiting, oldest_age, behind, at_least, at_most") == (0, None, 500, [], [])
    publish(db, "greet", 3)
    waiting, oldest, published = status(
        db, "waiting, clock_timestamp() - oldest_age, (select max(published_at) from pgmb.log_main)"
    )
    assert waiting == 3
    assert abs((oldest - published).total_seconds()) < 1


def test_a_count_beyond_its_bound_says_so(db: Db) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, "a", 10_000)
    assert status(db, "waiting, at_least") == (10_000, [])
    publish(db, "a", 1)
    assert status(db, "waiting, at_least, behind") == (10_000, ["waiting"], 10_001)


def test_what_a_condition_may_pass_is_a_bound_from_above(db: Db) -> None:
    db.execute("select pgmb.create_queue('q', condition => 'e.topic = ''greet''')")
    publish(db, "order.paid", 5)
    assert status(db, "waiting, at_least, at_most") == (5, [], ["waiting", "oldest_age"])


def test_maintenance_moves_an_idle_queue_past_what_does_not_match(db: Db) -> None:
    """Each turn a bounded part of it, up to the first event that matches."""
    db.execute("select pgmb.create_queue('q', '{greet}')")
    publish(db, "order.paid", 45_000)
    assert status(db, "waiting, at_least") == (0, ["waiting"])
    publish(db, "greet", 2)
    publish(db, "order.paid", 3_000)
    left = []
    for _ in range(4):
        age_leases(db, "10 seconds")
        db.execute("select pgmb.maintain()")
        left.append(status(db, "behind")[0])
    assert left == [28_002, 8_002, 3_002, 3_002]
    assert status(db, "waiting, at_least") == (2, [])
    assert len(db.execute("select * from pgmb.receive('q', 10)").fetchall()) == 2
    age_leases(db, "10 seconds")
    db.execute("select pgmb.maintain()")
    assert status(db, "waiting, behind") == (0, 0)


def test_maintenance_keeps_late_commits_of_an_idle_queue(db: Db, connect: Any) -> None:
    db.execute("select pgmb.create_queue('q', '{greet}')")
    late = connect()
    late.autocommit = False
    late.execute("select pgmb.publish('greet', '1')")
    publish(db, "order.paid", 2_000)
    age_leases(db, "10 seconds")
    db.execute("select pgmb.maintain()")
    assert status(db, "waiting, behind") == (0, 0)
    late.execute("select pgmb.publish('greet', '2')")
    late.commit()
    assert status(db, "waiting") == (2,)
    assert len(db.execute("select * from pgmb.receive('q', 10)").fetchall()) == 2


def test_maintenance_leaves_a_queue_that_is_received_from(db: Db) -> None:
    db.execute("select pgmb.create_queue('q', '{greet}')")
    publish(db, "order.paid", 2_000)
    db.execute("select pgmb.maintain()")
    assert status(db, "behind") == (2_000,)


def test_an_idle_queue_does_not_hold_back_retention(db: Db) -> None:
    db.execute("select pgmb.create_queue('q', '{greet}')")
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    publish(db, "order.paid", 2_000)
    db.execute("select pgmb.rotate('main')")
    publish(db, "order.paid", 2_000)
    for _ in range(3):
        age_leases(db, "10 seconds")
        db.execute("select pgmb.maintain()")
    assert db.execute("select count(*) from pgmb.segment where dropped_at is not null").fetchall() == [(1,)]


def test_a_queue_that_drops_its_oldest_shows_what_is_left(db: Db) -> None:
    db.execute("select pgmb.create_queue('q', max_length => 100, when_full => 'drop_oldest')")
    publish(db, "a", 300)
    age_leases(db, "10 seconds")
    db.execute("select pgmb.maintain()")
    assert status(db, "waiting") == (100,)


@pytest.mark.parametrize("settled", ["one by one", "within a transaction"])
def test_a_lease_whose_events_are_settled_is_not_shown(db: Db, settled: str) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, "a", 3)
    got = db.execute("select lease, seq from pgmb.receive('q', 3)").fetchall()
    assert status(db, "leases, leased_events") == (1, 3)
    assert status(db, "oldest_lease_age is not null") == (True,)
    if settled == "one by one":
        for n, (lease, seq) in enumerate(got, 1):
            db.execute("select pgmb.ack(%s, %s::bigint[])", [lease, [seq]])
            assert status(db, "leases, leased_events") == (int(n < 3), 3 - n)
    else:
        with db.transaction():
            db.execute("select pgmb.ack(%s, %s::bigint[])", [got[0][0], [seq for _, seq in got]])
    assert status(db, "leases, leased_events, retries, oldest_lease_age") == (0, 0, 0, None)


def test_leased_retries_are_leased_and_expired_leases_are_to_be_retried(db: Db) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, "a", 3)
    db.execute("select pgmb.retry((select lease from pgmb.receive('q', 3) limit 1), after => '0 s')")
    assert status(db, "leases, leased_events, retries") == (0, 0, 3)
    db.execute("select pgmb.receive('q', 3, '1 hour')")
    assert status(db, "leases, leased_events, retries") == (1, 3, 0)
    publish(db, "a", 2)
    db.execute("select pgmb.receive('q', 2, '1 millisecond')")
    db.execute("select pg_sleep(0.002)")
    assert status(db, "leases, leased_events, retries") == (1, 3, 2)


def test_what_is_published_a_second_ends_with_the_traffic(db: Db) -> None:
    def rate() -> float:
        found = db.execute("select published_per_second from pgmb.stream_status").fetchone()
        return float(found[0]) if found else -1.0

    db.execute("update pgmb.stream set created_at = created_at - interval '1 hour'")
    db.execute("select pgmb.tick('main')")
    publish(db, "a", 100)
    db.execute("select pgmb.tick('main')")
    assert rate() == 10.0
    db.execute("update pgmb.tick set at = at - interval '2 minutes'")
    assert rate() == 0.0
    publish(db, "a", 60)
    assert 0.4 < rate() <= 0.5, "without ticks: spread over the time since the last one"
