"""A queue with max_length that is full refuses what is published to its stream, whichever way it comes.

Streams without such a queue carry no trigger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

import pgmb
from harness.server import Server
from harness.sessions import Sessions

PUBLISH = "select pgmb.publish('a.b', '1')"


@pytest.fixture
def broker(dsn: str) -> Iterator[pgmb.Broker]:
    with pgmb.connect(dsn) as made:
        yield made


def triggers(db: psycopg.Connection[Any]) -> list[str]:
    rows = db.execute(
        "select tgrelid::regclass::text from pg_trigger where tgname = 'refuse_full'"
    ).fetchall()
    return [row[0] for row in rows]


def cap(db: psycopg.Connection[Any], length: int, patterns: str = "{#}", queue: str = "q") -> None:
    db.execute(
        "select pgmb.create_queue(%s, %s, max_length => %s, when_full => 'refuse')", [queue, patterns, length]
    )


def copy(db: psycopg.Connection[Any]) -> None:
    with db.cursor() as cursor, cursor.copy("copy pgmb.log_main (topic, payload) from stdin") as writing:
        writing.write("t\t1\n")


def refused(connection: psycopg.Connection[Any], statement: str = PUBLISH) -> str:
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement)
    assert caught.value.sqlstate == "MB040"
    return caught.value.diag.message_primary or ""


def test_a_full_queue_refuses_and_says_how_much_waits(db: psycopg.Connection[Any]) -> None:
    cap(db, 3)
    for _ in range(3):
        db.execute(PUBLISH)
    assert refused(db) == "queue 'q' is full: 3 events wait, max_length is 3"
    refused(db, "select pgmb.publish_many('t', '{1,2}'::json[])")
    with pytest.raises(psycopg.Error, match="is full"):
        copy(db)
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (3,)
    lease = db.execute("select lease from pgmb.receive('q', 1)").fetchone()
    db.execute(PUBLISH)
    refused(db)
    assert lease is not None
    db.execute("select pgmb.retry(%s, after => '0 s')", [lease[0]])
    refused(db)
    db.execute("select pgmb.purge('q')")
    db.execute(PUBLISH)


async def test_clients_raise_queue_full(broker: pgmb.Broker, dsn: str, db: psycopg.Connection[Any]) -> None:
    cap(db, 5)
    assert broker.publish_many("t", range(9000)) == 9000, "one statement may overshoot"
    for publish in (lambda: broker.publish("t", 1), lambda: broker.publish_many("t", range(9000))):
        with pytest.raises(pgmb.QueueFull, match="'q' is full: 5 events wait, max_length is 5") as caught:
            publish()
        assert "max_length" in (caught.value.hint or "")
    async with await pgmb.aconnect(dsn) as abroker:
        with pytest.raises(pgmb.QueueFull):
            await abroker.publish("t", 1)


def test_only_what_the_queue_would_get_counts(db: psycopg.Connection[Any]) -> None:
    cap(db, 3, "{a.*}")
    db.execute("select pgmb.publish_many('b', array_fill('1'::json, array[50]))")
    db.execute(PUBLISH)
    db.execute(PUBLISH)
    db.execute("select pgmb.publish('b', '1')")
    db.execute(PUBLISH)
    assert "3 events wait" in refused(db)
    refused(db, "select pgmb.publish('b', '1')")


def test_what_was_rolled_back_does_not_count(db: psycopg.Connection[Any]) -> None:
    cap(db, 5)
    for _ in range(10):
        with db.transaction(force_rollback=True):
            db.execute(PUBLISH)
    for _ in range(5):
        db.execute(PUBLISH)
    refused(db)


def test_a_transactions_own_events_count(db: psycopg.Connection[Any]) -> None:
    cap(db, 5)
    db.execute("begin")
    for _ in range(5):
        db.execute(PUBLISH)
    assert "5 events wait" in refused(db)
    db.execute("rollback")
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (0,)


def test_many_publishers_overshoot_by_little(db: psycopg.Connection[Any], connect: Any) -> None:
    cap(db, 50)
    counts: list[int] = []

    def publish(connection: psycopg.Connection[Any]) -> None:
        for done in range(100):
            try:
                connection.execute(PUBLISH)
            except psycopg.errors.DatabaseError:
                counts.append(done)
                return

    threads = [threading.Thread(target=publish, args=(connect(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 50 <= sum(counts) < 50 + 4
    refused(db)


def test_a_session_that_found_room_notices_a_full_queue(db: psycopg.Connection[Any], connect: Any) -> None:
    cap(db, 10)
    other = connect()
    db.execute(PUBLISH)
    for _ in range(9):
        other.execute(PUBLISH)
    refused(db)
    refused(other)
    db.execute("select pgmb.alter_queue('q', max_length => 12)")
    db.execute(PUBLISH)
    other.execute(PUBLISH)
    refused(db)
    db.execute("select pgmb.alter_queue('q', max_length => 2)")
    refused(other)


def test_delayed_events_that_were_accepted_are_not_refused(db: psycopg.Connection[Any]) -> None:
    cap(db, 2)
    db.execute("select pgmb.publish('t', '1', delay => '1 hour')")
    db.execute("select pgmb.publish_many('t', '{1,2}'::json[])")
    db.execute("update pgmb.delayed set due_at = clock_timestamp()")
    assert db.execute("select pgmb_internal.release_due('main', clock_timestamp())").fetchone() == (1,)
    refused(db)


def test_a_publisher_cannot_pass_as_a_release(
    db: psycopg.Connection[Any], server: Server, connect: Any
) -> None:
    cap(db, 1)
    role = f"capped_{uuid4().hex[:12]}"
    server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
    try:
        db.execute("select pgmb.grant_publish('main', %s)", [role])
        publisher = connect(server.dsn(db.info.dbname, role))
        publisher.execute(PUBLISH)
        publisher.execute("set pgmb.releasing = on")
        refused(publisher)
        publisher.close()
    finally:
        db.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
        server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_only_streams_that_need_it_carry_the_trigger(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.create_queue('plain')")
    db.execute("select pgmb.create_queue('dropping', max_length => 3, when_full => 'drop_oldest')")
    assert triggers(db) == []
    cap(db, 3)
    cap(db, 3, queue="second")
    assert triggers(db) == ["pgmb.log_main"]
    db.execute("select pgmb.drop_queue('second')")
    assert triggers(db) == ["pgmb.log_main"]
    db.execute("select pgmb.alter_queue('q', max_length => 0)")
    assert triggers(db) == []
    db.execute("select pgmb.alter_queue('q', max_length => 3)")
    assert triggers(db) == ["pgmb.log_main"]
    db.execute("select pgmb.alter_queue('q', when_full => 'drop_oldest')")
    assert triggers(db) == []
    db.execute("select pgmb.alter_queue('q', when_full => 'refuse')")
    db.execute("select pgmb.drop_queue('q')")
    assert triggers(db) == []


def test_rebasing_makes_the_trigger_anew(db: psycopg.Connection[Any]) -> None:
    """It names the owner, who may be another after a restore."""
    cap(db, 1)
    definition = "select pg_get_triggerdef(oid) from pg_trigger where tgname = 'refuse_full'"
    made = db.execute(definition).fetchone()
    db.execute("drop trigger refuse_full on pgmb.log_main")
    db.execute(
        "create trigger refuse_full before insert on pgmb.log_main for each statement"
        " when (current_user <> 'somebody else') execute function pgmb_internal.refuse_full(1)"
    )
    db.execute("select pgmb.rebase()")
    assert db.execute(definition).fetchone() == made
    db.execute(PUBLISH)
    refused(db)


def test_rotation_goes_on_and_the_cap_holds_across_segments(db: psycopg.Connection[Any]) -> None:
    cap(db, 4)
    for _ in range(3):
        db.execute(PUBLISH)
        db.execute("select pgmb.rotate()")
        db.execute("select pgmb.maintain()")
    db.execute(PUBLISH)
    assert "4 events wait" in refused(db)
    # A receive need not cross segments.
    received = sum(len(db.execute("select * from pgmb.receive('q')").fetchall()) for _ in range(8))
    assert received == 4
    db.execute(PUBLISH)


def test_a_cap_waits_for_no_publisher_in_an_open_transaction(sessions: Sessions) -> None:
    """It says so; and others publish meanwhile, at most 100 ms delayed."""
    sessions["open"].run("begin")
    sessions["open"].run(PUBLISH)
    creating = sessions["admin"].start("select pgmb.create_queue('q', max_length => 3)")
    slowest = 0.0
    published = 0
    while not creating.done():
        began = time.monotonic()
        sessions["publisher"].run(PUBLISH)
        slowest = max(slowest, time.monotonic() - began)
        published += 1
    with pytest.raises(psycopg.Error, match="is in use") as caught:
        creating.result()
    assert caught.value.sqlstate == "MB004"
    assert published > 20
    assert slowest < 1, "50 ms, with the patience that a loaded machine needs"
    sessions["open"].run("commit")
    assert sessions["admin"].value("select pgmb.create_queue('q', max_length => 3)") is True


def test_a_trigger_that_cannot_be_dropped_now_goes_later(
    db: psycopg.Connection[Any], sessions: Sessions
) -> None:
    cap(db, 3)
    sessions["open"].run("begin")
    sessions["open"].run(PUBLISH)
    db.execute("select pgmb.drop_queue('q')")
    assert triggers(db) == ["pgmb.log_main"]
    for _ in range(5):
        sessions["other"].run(PUBLISH)
    db.execute("select pgmb.maintain()")
    sessions["open"].run("commit")
    db.execute("select pgmb.maintain()")
    assert triggers(db) == []
