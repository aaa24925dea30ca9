"""A publish under a deduplication key takes place once: repeated, it returns the first event's id.

The key belongs to the publisher's transaction: rolled back, it was never taken; about to commit, others wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

import pgmb
from harness.server import Server
from harness.sessions import Sessions
from pgmb import NewEvent

ONCE = "select pgmb.publish('t', '1', dedup_key => %s)"


@pytest.fixture
def broker(dsn: str) -> Iterator[pgmb.Broker]:
    with pgmb.connect(dsn) as made:
        yield made


def payloads(db: psycopg.Connection[Any], stream: str = "main") -> list[Any]:
    return [row[0] for row in db.execute(f'select payload from pgmb."log_{stream}" order by seq').fetchall()]


def keys(db: psycopg.Connection[Any]) -> list[str]:
    return [row[0] for row in db.execute("select key from pgmb.dedup order by key").fetchall()]


def test_a_repeated_publish_returns_the_first_events_id(
    broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_queue("q")
    first = broker.publish("order.paid", 1, dedup_key="order 42")
    assert broker.publish("order.paid", 2, dedup_key="order 42") == first
    assert broker.publish("order.sent", 3, dedup_key="order 42", id=uuid4(), delay=60) == first
    assert broker.publish("order.paid", 4, dedup_key="order 43") != first
    lease = broker.receive("q")
    assert [(event.payload, event.id == first) for event in lease] == [(1, True), (4, False)]
    assert db.execute("select count(*) from pgmb.delayed").fetchone() == (0,)


def test_a_key_is_of_one_stream(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.create_stream("other")
    first = broker.publish("t", 1, dedup_key="k")
    second = broker.publish("t", 2, dedup_key="k", stream="other")
    assert first != second
    assert broker.publish("t", 3, dedup_key="k", stream="other") == second
    assert payloads(db, "other") == [2]
    broker.drop_stream("other")
    assert db.execute("select stream from pgmb.dedup").fetchall() == [("main",)]
    with pytest.raises(pgmb.NotFound):
        broker.publish("t", 1, dedup_key="k", stream="other")


def test_delayed_events_have_keys_too(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    later = broker.publish("t", 1, dedup_key="k", delay=3600)
    assert broker.publish("t", 2, dedup_key="k", delay=3600) == later
    assert broker.publish("t", 3, dedup_key="k") == later
    assert db.execute("select id, payload from pgmb.delayed").fetchall() == [(later, 1)]
    assert payloads(db) == []


def test_an_id_of_ones_own_comes_back(broker: pgmb.Broker) -> None:
    own = uuid4()
    assert broker.publish("t", 1, id=own, dedup_key="k") == own
    assert broker.publish("t", 1, id=own, dedup_key="k") == own
    broker.create_queue("q", starting=broker.earliest())
    assert [event.id for event in broker.receive("q")] == [own]


def test_after_its_time_a_key_is_free_again(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    first = broker.publish("t", 1, dedup_key="k", dedup_for=timedelta(hours=1))
    db.execute("update pgmb.dedup set expires_at = clock_timestamp()")
    second = broker.publish("t", 2, dedup_key="k")
    assert second != first
    assert broker.publish("t", 3, dedup_key="k") == second
    assert payloads(db) == [1, 2]


def test_maintenance_deletes_expired_keys_in_portions(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.publish('t', '1', dedup_key => 'k' || n) from generate_series(1, 25) n")
    db.execute("update pgmb.dedup set expires_at = clock_timestamp() where key <> 'k7'")
    assert db.execute("select pgmb.clear_keys(10)").fetchone() == (10,)
    db.execute("select pgmb.maintain()")
    assert keys(db) == ["k7"]


@pytest.mark.parametrize("key", ["", "x" * 501])
def test_a_key_has_1_to_500_characters(broker: pgmb.Broker, key: str) -> None:
    with pytest.raises(pgmb.InvalidArgument, match=f"500 characters, got {len(key)}"):
        broker.publish("t", 1, dedup_key=key)
    with pytest.raises(pgmb.InvalidArgument, match="characters"):
        broker.publish_many([NewEvent("t", 1, dedup_key=key)])


def test_a_key_of_500_wide_characters_will_do(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    key = "".join(chr(0x1F300 + n) for n in range(500))
    assert broker.publish("t", 1, dedup_key=key) == broker.publish("t", 1, dedup_key=key)


@pytest.mark.parametrize("dedup_for", [0, -1, timedelta(days=-1)])
def test_a_key_is_remembered_for_some_time(broker: pgmb.Broker, dedup_for: Any) -> None:
    with pytest.raises(pgmb.InvalidArgument, match="dedup_for is more than zero"):
        broker.publish("t", 1, dedup_key="k", dedup_for=dedup_for)


def test_a_rolled_back_publish_leaves_no_key(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    with broker.connection() as conn, conn.transaction(force_rollback=True):
        broker.publish("t", 1, dedup_key="k", conn=conn)
        broker.publish_many([NewEvent("t", 2, dedup_key="m")], conn=conn)
    assert keys(db) == []
    broker.publish("t", 3, dedup_key="k")
    assert payloads(db) == [3]


def test_the_second_waits_for_the_firsts_commit(sessions: Sessions, db: psycopg.Connection[Any]) -> None:
    one, two = sessions.open("one", "two")
    one.run("begin")
    first = one.value(ONCE, ["k"])
    waiting = two.start(ONCE, ["k"]).blocked()
    one.run("commit")
    assert waiting.result() == [(first,)]
    assert payloads(db) == [1]


def test_the_second_publishes_if_the_first_rolls_back(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    one, two, three = sessions.open("one", "two", "three")
    one.run("begin")
    first = one.value(ONCE, ["k"])
    waiting = two.start(ONCE, ["k"]).blocked()
    one.run("rollback")
    ((second,),) = waiting.result()
    assert second != first
    assert three.value(ONCE, ["k"]) == second
    assert payloads(db) == [1]


def test_of_two_at_a_keys_expiry_one_publishes(sessions: Sessions, db: psycopg.Connection[Any]) -> None:
    one, two = sessions.open("one", "two")
    old = one.value(ONCE, ["k"])
    db.execute("update pgmb.dedup set expires_at = clock_timestamp()")
    one.run("begin")
    first = one.value(ONCE, ["k"])
    assert first != old
    waiting = two.start(ONCE, ["k"]).blocked()
    one.run("commit")
    assert waiting.result() == [(first,)]
    assert payloads(db) == [1, 1]


def test_an_older_snapshot_fails_instead_of_publishing_twice(sessions: Sessions) -> None:
    one, two = sessions.open("one", "two")
    two.run("begin isolation level repeatable read")
    two.run("select 1")
    one.run(ONCE, ["k"])
    with pytest.raises(psycopg.errors.SerializationFailure):
        two.run(ONCE, ["k"])
    two.run("rollback")


def test_publish_many_counts_what_it_really_published(
    broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.publish("t", 0, dedup_key="old")
    events = [
        NewEvent("t", 1, dedup_key="b"),
        NewEvent("t", 2, dedup_key="old"),
        NewEvent("t", 3),
        NewEvent("t", 4, dedup_key="a"),
        NewEvent("t", 5, dedup_key="b"),
        NewEvent("t", 6),
    ]
    assert broker.publish_many(events) == 4
    assert payloads(db) == [0, 1, 3, 4, 6], "the first of a key, in the order given"
    assert broker.publish_many(events) == 2
    assert broker.publish_many([]) == 0


def test_publish_many_returns_ids_by_key(broker: pgmb.Broker) -> None:
    """What the batch published under a key is what a later publish under it returns."""
    given = uuid4()
    broker.create_queue("q")
    broker.publish_many([NewEvent("t", 1, dedup_key="a", id=given), NewEvent("t", 2, dedup_key="b")])
    one, two = broker.receive("q")
    assert one.id == given == broker.publish("t", 1, dedup_key="a")
    assert two.id == broker.publish("t", 1, dedup_key="b")


def test_large_lists_with_keys_go_in_blocks_of_one_transaction(
    broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    def events(count: int, keyed: Callable[[int], bool]) -> Iterator[NewEvent]:
        for n in range(count):
            yield NewEvent("t", n, dedup_key=f"k{n % 5000}" if keyed(n) else None)

    assert broker.publish_many(events(6000, lambda n: True)) == 5000
    assert payloads(db) == list(range(5000))
    assert broker.publish_many(events(9000, lambda n: n == 8500)) == 8999, "k3500 was there"
    assert broker.publish_many(events(9000, lambda n: n < 10)) == 8990
    before = len(payloads(db))
    with pytest.raises(pgmb.InvalidArgument):
        broker.publish_many(
            itertools.chain(events(7000, lambda n: n == 4100), [NewEvent("t", 1, dedup_key="")])
        )
    assert len(payloads(db)) == before, "all or none"


@pytest.mark.parametrize("commit", [True, False])
def test_large_lists_join_the_callers_transaction(
    broker: pgmb.Broker, dsn: str, db: psycopg.Connection[Any], commit: bool
) -> None:
    events = [NewEvent("t", n, dedup_key=f"k{n}" if n > 2500 else None) for n in range(5000)]
    with psycopg.connect(dsn) as conn:
        assert broker.publish_many(events, conn=conn) == 5000
        assert payloads(db) == [], "not committed by publish_many"
        if not commit:
            conn.rollback()
    assert len(payloads(db)) == (5000 if commit else 0)


async def test_the_asynchronous_client_does_the_same(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        first = await broker.publish("t", 1, dedup_key="k")
        assert await broker.publish("t", 2, dedup_key="k") == first
        events = [NewEvent("t", n, dedup_key=f"k{n}") for n in range(3000)]
        assert await broker.publish_many(events, dedup_for=60) == 3000
        assert await broker.publish_many(events) == 0
    assert len(payloads(db)) == 3001


def test_batches_with_the_same_keys_do_not_deadlock(sessions: Sessions, db: psycopg.Connection[Any]) -> None:
    many = "select pgmb.publish_many(%s, %s::json[], dedup_keys => %s)"
    one, two = sessions.open("one", "two")
    one.run("begin")
    assert one.value(many, [["t"] * 2, ["1"] * 2, ["b", "c"]]) == 2
    waiting = two.start(many, [["t"] * 3, ["2"] * 3, ["c", "a", "b"]]).blocked()
    assert one.value(many, [["t"], ["1"], ["d"]]) == 1
    one.run("commit")
    assert waiting.result() == [(1,)]
    assert payloads(db) == [1, 1, 1, 2]


@pytest.fixture
def publisher(server: Server, db: psycopg.Connection[Any], connect: Any) -> Iterator[psycopg.Connection[Any]]:
    """Acts as a role that may publish to `main` and to nothing else."""
    role = f"keyed_{uuid4().hex[:12]}"
    server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    connection = connect(server.dsn(db.info.dbname, role))
    yield connection
    connection.close()
    db.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
    server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_a_publisher_takes_keys_of_its_streams_only(
    db: psycopg.Connection[Any], publisher: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_stream('secret')")
    first = publisher.execute(ONCE, ["k"]).fetchall()
    assert publisher.execute(ONCE, ["k"]).fetchall() == first
    assert publisher.execute(
        "select pgmb.publish_many('{t,t}', '{1,2}'::json[], dedup_keys => '{k,l}')"
    ).fetchall() == [(1,)]
    for statement in (
        "select pgmb.publish('t', '1', stream => 'secret', dedup_key => 'x')",
        "select pgmb.claim_key('secret', 'x', gen_random_uuid(), '1 day')",
        "insert into pgmb.dedup values ('secret', 'x', gen_random_uuid(), 'infinity')",
        "select * from pgmb.dedup",
        "delete from pgmb.dedup",
        "update pgmb.dedup set expires_at = now()",
        "select pgmb.clear_keys()",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            publisher.execute(statement)
    assert keys(db) == ["k", "l"]


def test_a_definer_function_publishes_with_its_owners_rights(
    db: psycopg.Connection[Any], publisher: psycopg.Connection[Any]
) -> None:
    """As publishing without a key does."""
    db.execute("select pgmb.create_stream('inner')")
    db.execute(
        "create function notify_inner() returns uuid language sql security definer as"
        " $$ select pgmb.publish('t', '1', stream => 'inner', dedup_key => 'k') $$"
    )
    first: list[tuple[UUID]] = publisher.execute("select notify_inner()").fetchall()
    assert publisher.execute("select notify_inner()").fetchall() == first
    assert payloads(db, "inner") == [1]
