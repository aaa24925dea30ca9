"""Promise 16: the cost of a claim does not grow with what is delayed, waiting to be retried, settled or
behind.

Cost is pages touched, not time: the same on every machine and under any load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from harness.states import (
    add_dead,
    add_leases,
    add_retries,
    add_settled_claims,
    age_leases,
    retries_waiting,
    stop_vacuum,
)

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

Connection = psycopg.Connection[Any]


def pages(db: Connection, queue: str = "q", size: int = 10) -> int:
    """Pages that a receive of `size` events touches, rolled back so that it can be repeated: the fewest of
    several, because the first ones fill caches, and one after an autovacuum reads catalogs again."""
    return min(pages_once(db, queue, size) for _ in range(4))


def pages_once(db: Connection, queue: str, size: int) -> int:
    with db.transaction(force_rollback=True):
        # So that each of them looks for expired leases, which a receive does at most every 50 ms.
        db.execute("select pg_sleep(0.06)")
        ((plan,),) = db.execute(
            "explain (analyze, buffers, timing off, format json) select * from pgmb.receive(%s, %s)",
            [queue, size],
        ).fetchall()
    root = plan[0]["Plan"]
    assert root["Actual Rows"] > 0
    return int(root["Shared Hit Blocks"]) + int(root["Shared Read Blocks"])


def publish(db: Connection, count: int) -> None:
    db.execute("select pgmb.publish_many('t', array_fill('1'::json, array[%s]))", [count])


def delayed(db: Connection) -> None:
    db.execute(
        "insert into pgmb.delayed (id, stream, due_at, topic, payload) select gen_random_uuid(), 'main',"
        " now() + interval '1 hour' + g * interval '1 ms', 't', '1' from generate_series(1, 20000) g"
    )


def retries(db: Connection) -> None:
    add_retries(db, 20_000)


def settled_claims(db: Connection) -> None:
    add_settled_claims(db, 20_000, "q")


def live_leases(db: Connection) -> None:
    add_leases(db, 20_000)


def dead_letters(db: Connection) -> None:
    add_dead(db, 20_000)


def a_backlog(db: Connection) -> None:
    publish(db, 20000)


def other_queues(db: Connection) -> None:
    db.execute("select pgmb.create_queue('other' || g) from generate_series(1, 300) g")


def history_behind(db: Connection) -> None:
    publish(db, 20000)
    while rows := db.execute("select distinct lease from pgmb.receive('q', 5000)").fetchall():
        db.execute("select pgmb.ack(%s)", rows[0])
    publish(db, 100)


@pytest.mark.parametrize(
    "load",
    [delayed, retries, settled_claims, live_leases, dead_letters, a_backlog, other_queues, history_behind],
    ids=lambda load: load.__name__,
)
def test_the_cost_of_a_claim_stays_flat(db: Connection, load: Callable[[Connection], None]) -> None:
    stop_vacuum(db)
    db.execute("select pgmb.create_queue('q')")
    publish(db, 100)
    before = pages(db)
    load(db)
    after = pages(db)
    # A btree of many is two levels higher than an empty one; each look costs that much more.
    assert after <= before + 25, f"{before} pages before, {after} after"


def test_a_pinned_snapshot_does_not_make_claims_dearer(db: Connection, connect: Any) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 50)
    before = pages(db)
    pin: Connection = connect(autocommit=False)
    pin.execute("set transaction isolation level repeatable read")
    pin.execute("select pg_current_xact_id()")
    for _ in range(400):
        publish(db, 1)
        rows = db.execute("select distinct lease from pgmb.receive('q', 1)").fetchall()
        db.execute("select pgmb.ack(%s)", rows[0])
    after = pages(db)
    assert after <= before + 25, f"{before} pages before, {after} after"


def test_an_empty_receive_writes_nothing_and_takes_no_xid(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q', '{wanted}')")
    publish(db, 10)
    db.execute("select pgmb.receive('q')")
    publish(db, 10)
    for _ in range(3):
        with db.transaction():
            assert db.execute("select * from pgmb.receive('q')").fetchall() == []
            assert db.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)


@pytest.mark.parametrize("options", ["", ", max_in_flight => 1000"], ids=["plain", "limited"])
def test_receives_after_writes_do_not_grow_dearer(db: Connection, options: str) -> None:
    """The outbox the other way round: the application writes, then receives, always in one transaction."""
    db.execute(f"select pgmb.create_queue('q'{options})")

    def work(rounds: int) -> int:
        for _ in range(rounds):
            with db.transaction():
                db.execute("select pg_current_xact_id()")
                for (lease,) in db.execute("select distinct lease from pgmb.receive('q')").fetchall():
                    db.execute("select pgmb.ack(%s)", [lease])
                publish(db, 50)
        with db.transaction():
            db.execute("select pg_current_xact_id()")
            return pages(db)

    before = work(10)
    after = work(100)
    assert after <= before + 25, f"{before} pages before, {after} after"


@pytest.mark.parametrize("options", ["", ", max_in_flight => 1000"], ids=["plain", "limited"])
@pytest.mark.parametrize("written", [False, True], ids=["reading", "writing"])
def test_a_receive_finds_what_lies_behind_numbers_that_give_it_nothing(
    db: Connection, options: str, written: bool
) -> None:
    db.execute(f"select pgmb.create_queue('q'{options})")
    publish(db, 1)
    db.execute("select nextval('pgmb.seq_main') from generate_series(1, 60000)")
    publish(db, 1)
    for _ in range(2):
        with db.transaction():
            if written:
                db.execute("select pg_current_xact_id()")
            assert len(db.execute("select * from pgmb.receive('q', 1)").fetchall()) == 1


def test_a_parked_backlog_does_not_grow_dearer_under_a_pinned_snapshot(db: Connection, connect: Any) -> None:
    """In an ordered queue, what was delivered of a key does not lie in the way of what waits behind it."""
    db.execute("select pgmb.create_queue('q', ordered => true, shards => 1)")

    def published(count: int) -> None:
        db.execute(
            "select pgmb.publish('t', '1', key => 'k' || g %% 3) from generate_series(1, %s) g", [count]
        )

    def consume(leases: int) -> None:
        for _ in range(leases):
            rows = db.execute("select distinct lease from pgmb.receive('q', 20)").fetchall()
            db.execute("select pgmb.ack(%s)", rows[0])

    published(3)
    ((held,),) = db.execute("select distinct lease from pgmb.receive('q')").fetchall()
    # A young lease is waited for; behind an old one events are parked.
    age_leases(db)
    published(4500)
    while retries_waiting(db) != 4500:
        assert db.execute("select * from pgmb.receive('q', 1000)").fetchall() == []
    db.execute("select pgmb.ack(%s)", [held])
    # One of the keys stays leased.
    db.execute("select pgmb.receive('q', 1, '1 hour')")
    pin: Connection = connect(autocommit=False)
    pin.execute("set transaction isolation level repeatable read")
    pin.execute("select pg_current_xact_id()")
    consume(20)
    before = pages(db)
    consume(120)
    after = pages(db)
    # One dead row per lease is left where receives look for what is due.
    assert after <= before + 3 * 120, f"{before} pages before, {after} after"
