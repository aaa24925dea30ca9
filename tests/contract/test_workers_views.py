"""The views of a queue's messages show what is not acknowledged, and the dead letters, and change nothing.

Their names are in nobody's way.
"""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from pgmb import schema
from tests.contract.test_workers import value, warned

PENDING = "select count(*) from pgmb.q_queue where acknoledge = false"
OBJECTS = """
    select c.relname, c.relkind, c.oid from pg_class c where c.relnamespace = 'pgmb'::regnamespace
    union all select t.typname, 't', t.oid from pg_type t where t.typnamespace = 'pgmb'::regnamespace
"""


@pytest.fixture
def worker(db: psycopg.Connection[Any]) -> UUID:
    registered = value(db, "select pgmb.worker('w', 'http://localhost/', 10)")
    assert isinstance(registered, UUID)
    return registered


@pytest.fixture
def sent(db: psycopg.Connection[Any], worker: UUID) -> list[UUID]:
    """Ten messages in queue q, and some beside it."""
    db.execute("select pgmb.create('q', 'a', 2, %s)", [worker])
    ids = [uuid4() for _ in range(10)]
    for number, message in enumerate(ids):
        db.execute("select pgmb.send(%s, 'a', to_jsonb(%s::int))", [message, number])
        db.execute("select pgmb.send(gen_random_uuid(), 'elsewhere', '0')")
    return ids


def views(db: psycopg.Connection[Any]) -> set[str]:
    rows = db.execute(
        "select viewname::text from pg_views where schemaname = 'pgmb' and viewname ~ '_queue$'"
    ).fetchall()
    return {row[0] for row in rows}


def test_what_waits_is_leased_or_is_tried_again_is_pending(
    db: psycopg.Connection[Any], sent: list[UUID]
) -> None:
    def state() -> dict[UUID, tuple[int, bool]]:
        rows = db.execute("select message_id, retries, locked, acknoledge from pgmb.q_queue").fetchall()
        assert len(rows) == len({row[0] for row in rows}), "each is shown once"
        assert not any(row[3] for row in rows)
        assert value(db, PENDING) == len(rows)
        return {row[0]: (row[1], row[2]) for row in rows}

    waiting = dict.fromkeys(sent, (0, False))
    assert state() == waiting
    lease, *_ = db.execute("select lease, seq from pgmb.receive('q', 4)").fetchall()
    held = db.execute("select id, seq from pgmb.between('main', pgmb.earliest(), pgmb.position())").fetchall()
    place = dict(held)
    leased = waiting | dict.fromkeys(sent[:4], (0, True))
    assert state() == leased
    # One is acknowledged, one is to be tried again at once, one in an hour, one stays leased.
    db.execute("select pgmb.ack(%s, array[%s])", [lease[0], place[sent[0]]])
    assert state() == {message: leased[message] for message in sent[1:]}
    db.execute("select pgmb.retry(%s, array[%s], after => '0 s')", [lease[0], place[sent[1]]])
    db.execute("select pgmb.retry(%s, array[%s], after => '1 h', error => 'no')", [lease[0], place[sent[2]]])
    rest = {message: leased[message] for message in sent[3:]}
    assert state() == rest | {sent[1]: (1, False), sent[2]: (1, False)}
    again, *_ = db.execute("select lease, id from pgmb.receive('q', 1)").fetchall()
    assert again[1] == sent[1]
    assert state() == rest | {sent[1]: (1, True), sent[2]: (1, False)}
    db.execute("select pgmb.bury(%s, error => 'broken')", [again[0]])
    assert state() == rest | {sent[2]: (1, False)}
    assert db.execute("select message_id, retries, error from pgmb.q_dead_letter_queue").fetchall() == [
        (sent[1], 1, "broken")
    ]
    db.execute("select pgmb.redrive('q')")
    assert state()[sent[1]] == (0, False)
    assert value(db, "select count(*) from pgmb.q_dead_letter_queue") == 0
    db.execute("select pgmb.ack(r.lease) from (select distinct lease from pgmb.receive('q', 100)) r")
    db.execute("select pgmb.ack(r.lease) from (select distinct lease from pgmb.receive('q', 100)) r")
    assert state() == {sent[2]: (1, False), sent[3]: (0, True)}
    db.execute("select pgmb.ack(%s)", [lease[0]])
    assert state() == {sent[2]: (1, False)}


def test_a_lease_that_expired_is_pending_and_no_longer_locked(
    db: psycopg.Connection[Any], sent: list[UUID]
) -> None:
    db.execute("select * from pgmb.receive('q', 3, lease_for => '1 microsecond')")
    assert value(db, PENDING) == 10
    assert value(db, "select count(*) from pgmb.q_queue where locked") == 0


def test_reading_changes_nothing(db: psycopg.Connection[Any], connect: Any, sent: list[UUID]) -> None:
    db.execute("select * from pgmb.receive('q', 3)")
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1', 600)")
    db.execute("update pgmb.delayed set due_at = now() - interval '1 second'")
    reader = connect(autocommit=False)
    reader.execute("set transaction read only")
    counted = {
        name: value(reader, f"select count(*) from pgmb.{name}")
        for name in ("q_queue", "q_dead_letter_queue", "messages", "queues", "workers")
    }
    assert counted == {"q_queue": 11, "q_dead_letter_queue": 0, "messages": 21, "queues": 1, "workers": 1}
    assert value(reader, "select pg_current_xact_id_if_assigned()") is None
    assert value(db, "select count(*) from pgmb.delayed") == 1
    assert len(db.execute("select * from pgmb.receive('q', 100)").fetchall()) >= 7


def test_rotation_and_late_commits_are_counted_too(
    db: psycopg.Connection[Any], connect: Any, sent: list[UUID]
) -> None:
    late = connect(autocommit=False)
    late.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '2')")
    db.execute("select pgmb.ack(r.lease) from (select distinct lease from pgmb.receive('q', 100)) r")
    db.execute("select pgmb.ack(r.lease) from (select distinct lease from pgmb.receive('q', 100)) r")
    assert value(db, PENDING) == 0
    late.commit()
    assert value(db, PENDING) == 1


def test_while_workers_are_busy_each_message_is_counted_once(
    db: psycopg.Connection[Any], dsn: str, worker: UUID
) -> None:
    """Nothing is acknowledged here: however often messages are leased and given back, all are there."""
    db.execute("select pgmb.create('q', 'a', 1000000, %s)", [worker])
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1') from generate_series(1, 300)")
    stop = threading.Event()

    def work() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stop.is_set():
                for lease, seq in connection.execute(
                    "select lease, seq from pgmb.receive('q', 7)"
                ).fetchall():
                    connection.execute("select pgmb.retry(%s, array[%s], after => '0 s')", [lease, seq])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        counts = [value(db, PENDING) for _ in range(100)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert counts == [300] * 100


def test_payloads_that_jsonb_cannot_hold_are_shown_as_text(db: psycopg.Connection[Any], worker: UUID) -> None:
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    odd = ['{"a": "\\u0000"}', '{"n": 1e400000}']
    for payload in odd:
        db.execute("select pgmb.publish('a', %s, headers => %s)", [payload, odd[0]])
    for view in ("q_queue", "messages"):
        assert {row[0] for row in db.execute(f"select body from pgmb.{view}").fetchall()} == set(odd)
    db.execute("select pgmb.bury(r.lease) from (select distinct lease from pgmb.receive('q')) r")
    bodies = db.execute("select body, headers from pgmb.q_dead_letter_queue").fetchall()
    assert {row[0] for row in bodies} == set(odd)


def test_messages_published_otherwise_are_shown_with_the_id_that_consumers_see(
    db: psycopg.Connection[Any], worker: UUID
) -> None:
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    published = value(db, "select pgmb.publish('a', '{}')")
    later = value(db, "select pgmb.publish('a', '{}', delay => '1 hour')")
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.publish('a', '{}', stream => 'other')")
    assert {row[0] for row in db.execute("select id from pgmb.messages").fetchall()} == {published, later}
    assert value(db, "select message_id from pgmb.q_queue") == published


def test_a_queue_called_queue_is_found_by_both_names(db: psycopg.Connection[Any], worker: UUID) -> None:
    db.execute("select pgmb.create('order_queue', 'order.*', 5, %s)", [worker])
    names = {"order_queue", "order_queue_queue", "order_dead_letter_queue", "order_queue_dead_letter_queue"}
    assert views(db) == names
    db.execute("select pgmb.send(gen_random_uuid(), 'order.created', '1')")
    assert [value(db, f"select count(*) from pgmb.{name}") for name in sorted(names)] == [0, 1, 0, 1]
    assert value(db, "select pgmb.drop_queue('order_queue')") is True
    assert views(db) == set()
    assert value(db, "select count(*) from pgmb.queue_view") == 0


@pytest.mark.parametrize(
    "name",
    [
        "order-queue",
        "Orders",
        'q"; drop table pgmb.queue; --',
        "it's",
        "a.b",
        "a b",
        "bestellung-ü",
        "%s %I %L",
        "select",
        "_",
        "ü" * 22,
    ],
)
def test_odd_names_have_views(db: psycopg.Connection[Any], worker: UUID, name: str) -> None:
    said = warned(db)
    db.execute("select pgmb.create(%s, 'a', 0, %s)", [name, worker])
    assert said == []
    assert views(db) == {f"{name}_queue", f"{name}_dead_letter_queue"}
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1'), pgmb.send(gen_random_uuid(), 'a', '2')")
    db.execute("select pgmb.bury(r.lease) from pgmb.receive(%s, 1) r", [name])
    for view in (f"{name}_queue", f"{name}_dead_letter_queue"):
        counted = db.execute(sql.SQL("select count(*) from pgmb.{}").format(sql.Identifier(view))).fetchone()
        assert counted == (1,)
    db.execute("select pgmb.drop_queue(%s)", [name])
    assert views(db) == set()


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("q" * 57, {"dead_letter"}),
        ("q" * 45, set()),
        ("q" * 46, {"dead_letter"}),
        ("q" * 58, {"dead_letter", "queue"}),
        ("ü" * 29, {"dead_letter", "queue"}),
        ("q" * 100, {"dead_letter", "queue"}),
    ],
)
def test_a_view_whose_name_would_be_cut_off_is_left_out_with_a_warning(
    db: psycopg.Connection[Any], worker: UUID, name: str, left_out: set[str]
) -> None:
    said = warned(db)
    db.execute("select pgmb.create(%s, 'a', 0, %s)", [name, worker])
    assert len(said) == len(left_out)
    assert all("too long" in line for line in said)
    wanted = {"queue": f"{name}_queue", "dead_letter": f"{name}_dead_letter_queue"}
    assert views(db) == {view for kind, view in wanted.items() if kind not in left_out}
    db.execute("select pgmb.drop_queue(%s)", [name])
    assert views(db) == set()


@pytest.mark.parametrize(
    "name", ["dead", "_queue", "log_x", "seq_x", "queue", "stream", "pgmb.queue", "claim"]
)
def test_no_object_of_ours_is_replaced_or_renamed(
    db: psycopg.Connection[Any], worker: UUID, name: str
) -> None:
    before = set(db.execute(OBJECTS).fetchall())
    db.execute("select pgmb.create(%s, 'a', 0, %s)", [name, worker])
    after = set(db.execute(OBJECTS).fetchall())
    assert before <= after
    db.execute("select pgmb.create_stream('x_queue')")
    db.execute("select pgmb.drop_stream('x_queue')")
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    assert value(db, "select count(*) from pgmb.receive(%s)", name) == 1
    db.execute("select pgmb.drop_queue(%s)", [name])
    assert set(db.execute(OBJECTS).fetchall()) == before


def test_a_name_that_is_taken_draws_a_warning(db: psycopg.Connection[Any], worker: UUID) -> None:
    """dead_queue is an index of ours."""
    said = warned(db)
    db.execute("select pgmb.create('dead', 'a', 0, %s)", [worker])
    assert len(said) == 1
    assert "pgmb.dead_queue" in said[0]
    assert views(db) == {"dead_dead_letter_queue"}


def test_of_two_queues_that_want_a_view_the_first_has_it(db: psycopg.Connection[Any], worker: UUID) -> None:
    said = warned(db)
    db.execute("select pgmb.create('order_queue', 'long', 0, %s)", [worker])
    assert said == []
    db.execute("select pgmb.create('order', 'short', 0, %s)", [worker])
    assert len(said) == 2
    db.execute("select pgmb.send(gen_random_uuid(), 'long', '\"long\"')")
    assert value(db, "select body from pgmb.order_queue") == "long"
    db.execute("select pgmb.drop_queue('order')")
    assert value(db, "select body from pgmb.order_queue") == "long"
    # Free again, it goes to whoever is created next, or once more.
    db.execute("select pgmb.create('order', 'short', 0, %s)", [worker])
    db.execute("select pgmb.drop_queue('order_queue')")
    assert views(db) == set()
    db.execute("select pgmb.create('order', 'short', 0, %s)", [worker])
    assert views(db) == {"order_queue", "order_dead_letter_queue"}


def test_two_that_create_at_once_both_succeed(dsn: str, worker: UUID, db: psycopg.Connection[Any]) -> None:
    failures: list[Exception] = []

    def create(name: str, pattern: str) -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                for _ in range(5):
                    connection.execute("select pgmb.create(%s, %s, 0, %s)", [name, pattern, worker])
        except Exception as failure:
            failures.append(failure)

    wanted = [("order", "a"), ("order_queue", "b"), ("order", "a"), ("order_queue", "b")]
    threads = [threading.Thread(target=create, args=one) for one in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {"order_queue", "order_queue_queue", "order_queue_dead_letter_queue"} <= views(db)
    db.execute("select pgmb.drop_queue('order'), pgmb.drop_queue('order_queue')")
    assert views(db) == set()


def test_what_was_rolled_back_leaves_no_view(db: psycopg.Connection[Any], worker: UUID) -> None:
    with db.transaction(force_rollback=True):
        db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    assert views(db) == set()
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    with db.transaction(force_rollback=True):
        db.execute("select pgmb.drop_queue('q')")
    assert value(db, PENDING) == 0


def test_views_that_somebody_dropped_or_replaced_are_in_nobodys_way(
    db: psycopg.Connection[Any], worker: UUID
) -> None:
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    db.execute("drop view pgmb.q_queue")
    db.execute("select pgmb.create('q', 'a', 0, %s)", [worker])
    assert value(db, PENDING) == 0
    db.execute("drop view pgmb.q_queue; create table pgmb.q_queue (mine int)")
    db.execute("select pgmb.drop_queue('q')")
    assert value(db, "select count(*) from pgmb.q_queue") == 0
    assert views(db) == set()


def test_views_stay_through_an_upgrade(db: psycopg.Connection[Any], sent: list[UUID]) -> None:
    schema.install(db)
    assert value(db, PENDING) == 10
    assert value(db, "select count(*) from pgmb.messages") == 20


def test_main_can_be_dropped_and_made_again(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.drop_stream('main')")
    schema.install(db)
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    assert value(db, "select count(*) from pgmb.messages") == 1


def test_limits_that_a_queue_gets_later_are_shown(db: psycopg.Connection[Any], sent: list[UUID]) -> None:
    db.execute("select pgmb.alter_queue('q', max_length => 4, when_full => 'drop_oldest')")
    rows = db.execute("select message_id from pgmb.q_queue").fetchall()
    assert {row[0] for row in rows} == set(sent[-4:])
    db.execute("select pgmb.bind('q', '{elsewhere}')")
    assert value(db, PENDING) == 4
    db.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    assert value(db, PENDING) == 4


def test_a_filter_that_a_queue_gets_later_is_asked(db: psycopg.Connection[Any], sent: list[UUID]) -> None:
    db.execute("select pgmb.bind('q', '{a}', filter => '$.payload >= 8')")
    db.execute(
        "select pgmb.send(gen_random_uuid(), 'a', '9', 600), pgmb.send(gen_random_uuid(), 'a', '1', 600)"
    )
    db.execute("update pgmb.delayed set due_at = now() - interval '1 second'")
    assert sorted(row[0] for row in db.execute("select body from pgmb.q_queue").fetchall()) == [8, 9, 9]
    db.execute("select pgmb.tick()")
    assert value(db, "select count(*) from pgmb.receive('q')") == 3
    assert value(db, PENDING) == 3


def test_a_condition_that_a_queue_gets_later_is_asked_within_a_timeout(
    db: psycopg.Connection[Any], sent: list[UUID]
) -> None:
    db.execute("select pgmb.bind('q', '{a}', condition => 'e.payload::text::int > 6')")
    with pytest.raises(psycopg.Error) as refusal:
        db.execute(PENDING)
    assert refusal.value.sqlstate == "MB024"
    db.execute("set statement_timeout = '20s'")
    assert value(db, PENDING) == 3
