"""`send` in all its forms: the id given is the event's, headers arrive, delays hold, an id is sent once."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import ClientCursor
from psycopg.types.json import Jsonb

from harness.sessions import Sessions

MESSAGE = UUID("0e0a1f6e-9c1f-4bd5-8d3c-a1a2a3a4a5a6")
ID, BODY, HEADERS = f"'{MESSAGE}'", """'{"n": 1}'""", """'{"source": "web"}'"""
GIVEN = {"source": "web"}

AT_ONCE = [
    (f"{ID}, 'a', {BODY}", None),
    (f"{ID}::uuid, 'a'::varchar, {BODY}::jsonb", None),
    (f"{ID}, 'a', {BODY}, {HEADERS}", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}::jsonb", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}::text", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}::varchar", GIVEN),
    (f"{ID}, 'a', {BODY}, null", None),
    (f"{ID}, 'a', {BODY}, null::jsonb", None),
    (f"{ID}, 'a', {BODY}, {HEADERS}, 0", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}, -5", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}, null::timestamptz", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}, null::integer", GIVEN),
    (f"{ID}, 'a', {BODY}, {HEADERS}, now() - interval '1 day'", GIVEN),
    (f"{ID}, 'a', {BODY}, 0", None),
    (f"{ID}, 'a', {BODY}, now()", None),
    (f"id => {ID}, routing_key => 'a', body => {BODY}", None),
    (f"id => {ID}, routing_key => 'a', body => {BODY}, headers => {HEADERS}", GIVEN),
    (f"body => {BODY}, headers => {HEADERS}::jsonb, routing_key => 'a', id => {ID}", GIVEN),
]

LATER = [
    (f"{ID}, 'a', {BODY}, {HEADERS}, 600", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, {HEADERS}::jsonb, 600::smallint", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, {HEADERS}::jsonb, 600::bigint", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, {HEADERS}::jsonb, 600.5", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, {HEADERS}::jsonb, now() + interval '10 minutes'", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, {HEADERS}, localtimestamp + interval '10 minutes'", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, 600", None, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, now() + interval '10 minutes'", None, timedelta(minutes=10)),
    (f"id => {ID}, routing_key => 'a', body => {BODY}, delay => 600", None, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, delay => 600, headers => {HEADERS}", GIVEN, timedelta(minutes=10)),
    (f"{ID}, 'a', {BODY}, delay => now() + interval '1 day'", None, timedelta(days=1)),
    (f"{ID}, 'a', {BODY}, {HEADERS}, 100 * 365 * 86400::bigint", GIVEN, timedelta(days=36500)),
    (f"{ID}, 'a', {BODY}, {HEADERS}, now() + interval '1000 years'", GIVEN, timedelta(days=365200)),
]


@pytest.fixture
def queue(db: psycopg.Connection[Any]) -> str:
    db.execute("select pgmb.create('q', 'a', 5, pgmb.worker('w', 'http://localhost/', 1))")
    return "q"


def received(db: psycopg.Connection[Any], queue: str) -> list[Any]:
    return db.execute(f"select id, topic, payload, headers from pgmb.receive('{queue}')").fetchall()


@pytest.mark.parametrize("factory", [psycopg.Cursor, ClientCursor], ids=["extended", "simple"])
@pytest.mark.parametrize(("arguments", "headers"), AT_ONCE)
def test_sent_at_once(
    db: psycopg.Connection[Any], connect: Any, queue: str, arguments: str, headers: Any, factory: Any
) -> None:
    connect(cursor_factory=factory).execute(f"select pgmb.send({arguments})")
    assert received(db, queue) == [(MESSAGE, "a", {"n": 1}, headers)]


@pytest.mark.parametrize("factory", [psycopg.Cursor, ClientCursor], ids=["extended", "simple"])
@pytest.mark.parametrize(("arguments", "headers", "delay"), LATER)
def test_sent_later(
    db: psycopg.Connection[Any],
    connect: Any,
    queue: str,
    arguments: str,
    headers: Any,
    delay: timedelta,
    factory: Any,
) -> None:
    connect(cursor_factory=factory).execute(f"select pgmb.send({arguments})")
    assert received(db, queue) == []
    ((sent, routing_key, body, seen, wait),) = db.execute(
        "select id, routing_key, body, headers, enqueued_at - now() from pgmb.messages"
    ).fetchall()
    assert (sent, routing_key, body, seen) == (MESSAGE, "a", {"n": 1}, headers)
    assert delay - timedelta(minutes=5) < wait <= delay + timedelta(days=delay.days // 100 + 1)
    assert db.execute("select count(*) from pgmb.q_queue").fetchone() == (0,)

    db.execute("update pgmb.delayed set due_at = now() - interval '1 second'")
    # Due, it belongs to the queue, though nobody has moved it into the log yet.
    assert db.execute("select message_id, locked from pgmb.q_queue").fetchall() == [(MESSAGE, False)]
    db.execute("select pgmb.tick()")
    assert db.execute("select message_id, locked from pgmb.q_queue").fetchall() == [(MESSAGE, False)]
    assert received(db, queue) == [(MESSAGE, "a", {"n": 1}, headers)]
    assert db.execute("select message_id, locked from pgmb.q_queue").fetchall() == [(MESSAGE, True)]


@pytest.mark.parametrize(
    "extra",
    [
        [],
        [Jsonb(GIVEN)],
        [json.dumps(GIVEN)],
        [None],
        [Jsonb(GIVEN), 3],
        [json.dumps(GIVEN), 3],
        [Jsonb(GIVEN), 2**40],
        [Jsonb(GIVEN), 0.25],
        [Jsonb(GIVEN), Decimal("1.5")],
        [Jsonb(GIVEN), datetime(2100, 1, 1, tzinfo=UTC)],
        [Jsonb(GIVEN), date(2100, 1, 1)],
        [3],
        [datetime(2100, 1, 1, tzinfo=UTC)],
    ],
)
@pytest.mark.parametrize("factory", [psycopg.Cursor, ClientCursor], ids=["extended", "simple"])
def test_parameters_of_a_client_find_their_form(connect: Any, extra: list[Any], factory: Any) -> None:
    connection = connect(cursor_factory=factory)
    for body in (Jsonb({"n": 1}), json.dumps({"n": 1})):
        given = [uuid4(), "a", body, *extra]
        connection.execute(f"select pgmb.send({', '.join(['%s'] * len(given))})", given)
    ((rows,),) = connection.execute(
        "select count(*) from pgmb.messages where body @> '{\"n\": 1}'"
    ).fetchall()
    assert rows == 2


@pytest.mark.parametrize("delay", ["", ", 600"])
def test_an_id_is_sent_once(db: psycopg.Connection[Any], queue: str, delay: str) -> None:
    db.execute(f"select pgmb.send({ID}, 'a', {BODY}{delay})")
    for repeated in (f"{ID}, 'a', {BODY}", f"{ID}, 'b', '2', {HEADERS}", f"{ID}, 'a', {BODY}, 5"):
        with pytest.raises(psycopg.errors.UniqueViolation):
            db.execute(f"select pgmb.send({repeated})")
    assert db.execute("select count(*) from pgmb.messages").fetchone() == (1,)
    db.execute(f"select pgmb.send(gen_random_uuid(), 'a', {BODY})")
    assert db.execute("select count(*) from pgmb.messages").fetchone() == (2,)


def test_an_id_that_was_rolled_back_is_free(db: psycopg.Connection[Any], queue: str) -> None:
    with db.transaction(force_rollback=True):
        db.execute(f"select pgmb.send({ID}, 'a', {BODY})")
    assert received(db, queue) == []
    db.execute(f"select pgmb.send({ID}, 'a', {BODY})")
    assert received(db, queue) == [(MESSAGE, "a", {"n": 1}, None)]


def test_two_that_send_one_id_at_once_send_it_once(sessions: Sessions, db: psycopg.Connection[Any]) -> None:
    first, second = sessions["first"], sessions["second"]
    first.run("begin")
    first.run(f"select pgmb.send({ID}, 'a', {BODY})")
    waiting = second.start(f"select pgmb.send({ID}, 'a', {BODY})").blocked()
    first.run("commit")
    with pytest.raises(psycopg.errors.UniqueViolation):
        waiting.result()
    assert db.execute("select count(*) from pgmb.messages").fetchone() == (1,)


def test_others_do_not_wait_for_a_sender(connect: Any) -> None:
    open_sender, other = connect(autocommit=False), connect()
    open_sender.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    other.execute("set lock_timeout = '5s'")
    other.execute("select pgmb.send(gen_random_uuid(), 'a', '1')")
    open_sender.rollback()


@pytest.mark.parametrize(
    ("arguments", "sqlstate"),
    [
        (f"null, 'a', {BODY}", "MB005"),
        (f"{ID}, null, {BODY}", "23502"),
        (f"{ID}, 'a', null", "23502"),
        (f"{ID}, null, {BODY}, 600", "23502"),
        (f"{ID}, 'a', null, 600", "23502"),
        (f"{ID}, 'a', '{{', {HEADERS}", "22P02"),
        (f"{ID}, 'a', {BODY}, 'text'", "22P02"),
        ("'nonsense', 'a', '1'", "22P02"),
        (f"{ID}, 'a', {BODY}, 1e300", "22008"),
    ],
)
def test_nonsense_is_refused_and_leaves_nothing(
    db: psycopg.Connection[Any], arguments: str, sqlstate: str
) -> None:
    with pytest.raises(psycopg.Error) as refusal:
        db.execute(f"select pgmb.send({arguments})")
    assert refusal.value.sqlstate == sqlstate
    assert db.execute("select count(*) from pgmb.messages").fetchone() == (0,)
    assert db.execute("select count(*) from pgmb.dedup").fetchone() == (0,)


def test_a_message_sent_in_a_transaction_is_routed_when_it_commits(
    db: psycopg.Connection[Any], connect: Any, queue: str
) -> None:
    sender = connect(autocommit=False)
    sender.execute(f"select pgmb.send({ID}, 'a', {BODY})")
    assert db.execute("select count(*) from pgmb.q_queue").fetchone() == (0,)
    assert sender.execute("select message_id from pgmb.q_queue").fetchall() == [(MESSAGE,)]
    sender.commit()
    assert db.execute("select message_id from pgmb.q_queue").fetchall() == [(MESSAGE,)]
