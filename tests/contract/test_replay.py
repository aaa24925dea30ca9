"""Replay: what went by comes to one endpoint again, by id, by time and filter, or because it failed."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from harness.states import deliveries, retries
from tests.contract.cast import Cast
from tests.contract.endpoints import (
    claim,
    create,
    dead,
    publish,
    receive,
    refused,
    settle,
    settle_claimed,
    value,
    waiting,
)
from tests.contract.test_privileges import refused as forbidden

BEGINNING = "2000-01-01"


def deliver(db: psycopg.Connection[Any], queue: str = "webhooks") -> None:
    """All that is there, to all that it is for. An ordered queue gives nothing for a moment after a lease."""
    while value(db, "select pgmb.queue_depth(%s)", queue):
        if got := receive(db, queue):
            settle(db, got.lease)


def ids(db: psycopg.Connection[Any], *names: int, stream: str = "main") -> list[UUID]:
    between = "pgmb.between(%s, pgmb.earliest(%s), pgmb.position(%s))"
    rows = db.execute(f"select id, payload::text::int from {between}", [stream] * 3).fetchall()
    return [id for id, name in rows if name in names]


def moment(db: psycopg.Connection[Any]) -> Any:
    return value(db, "select clock_timestamp()")


@pytest.fixture(params=["shared", "own", "ordered", "worker"])
def fed(request: pytest.FixtureRequest, db: psycopg.Connection[Any]) -> tuple[UUID, str]:
    """An endpoint named hook that asks for a.*, by each way of feeding one, and its queue."""
    match request.param:
        case "shared":
            return create(db, "hook", "{a.*}"), "webhooks"
        case "worker":
            worker = value(db, "select pgmb.worker('hook', 'http://localhost/', null)")
            db.execute("select pgmb.create('q', 'a.*', 5, %s)", [worker])
            return worker, "q"
        case kind:
            return create(db, "hook", "{a.*}", batch=5, ordered=kind == "ordered"), "endpoint/hook"


def due(db: psycopg.Connection[Any], queue: str) -> dict[int, int]:
    """What comes now, with its attempt, and settles it."""
    if queue == "webhooks":
        held = claim(db)
        settle_claimed(db, held.lease, held.rows())
        return {name: row[2] for name, row in held.items()}
    found: dict[int, int] = {}
    while any(event.due_in is not None and event.due_in <= 0 for event in retries(db)):
        if got := receive(db, queue):
            found |= got.attempts
            settle(db, got.lease)
    return found


def test_events_are_sent_again_by_id(db: psycopg.Connection[Any], fed: tuple[UUID, str]) -> None:
    given = uuid4()
    publish(db, 1, 2, topic="a.b", key="k")
    publish(db, 3, topic="b")
    db.execute("select pgmb.publish('a.c', '4', id => %s)", [given])
    db.execute("select pgmb.rotate()")
    publish(db, 5, topic="a.b", key="l")
    chosen = ids(db, 1, 3, 5)
    deliver(db, fed[1])
    resend = "select pgmb.resend('hook', %s::uuid[])"
    assert value(db, resend, [*chosen, *chosen, given, uuid4(), None]) == 4
    assert value(db, resend, [given]) == 1, "it waits already, and is one"
    assert due(db, fed[1]) == {1: 1, 3: 1, 4: 1, 5: 1}
    assert due(db, fed[1]) == {}
    assert value(db, resend, []) == value(db, resend, None) == 0
    with refused("MB060"):
        db.execute("select pgmb.resend('none', '{}')")


def test_what_is_being_tried_is_sent_again_as_well(db: psycopg.Connection[Any]) -> None:
    create(db, "hook")
    publish(db, 1)
    deliver(db)
    (id,) = ids(db, 1)
    db.execute("select pgmb.resend('hook', %s)", [[id]])
    held = claim(db)
    db.execute("select pgmb.resend('hook', %s)", [[id]])
    assert list(claim(db)) == [1]
    assert settle_claimed(db, held.lease, held.rows()) == 1
    assert len(waiting(db)) == 1


def test_what_an_endpoint_asks_for_is_replayed_between_two_times(
    db: psycopg.Connection[Any], fed: tuple[UUID, str]
) -> None:
    publish(db, 1, topic="a.b", key="k")
    db.execute("select pgmb.tick()")
    since = moment(db)
    publish(db, 2, 3, topic="a.b", key="k")
    publish(db, 4, topic="b")
    db.execute("select pgmb.rotate()")
    publish(db, 5, topic="a.c")
    until = moment(db)
    publish(db, 6, topic="a.b")
    deliver(db, fed[1])
    replay = "select pgmb.replay('hook', %s, %s, %s, %s, %s)"
    assert value(db, replay, since, until, None, None, 100) == 3
    assert due(db, fed[1]) == {2: 1, 3: 1, 5: 1}
    assert value(db, replay, since, None, "a.b", None, 100) == 3
    assert due(db, fed[1]) == {2: 1, 3: 1, 6: 1}
    assert value(db, replay, "-infinity", None, None, "$.payload > 2", 2) == 2
    assert due(db, fed[1]) == {3: 1, 5: 1}, "the oldest first"
    assert value(db, replay, until, since, None, None, 100) == 0
    assert value(db, replay, since, None, None, None, 0) == 0


def test_fields_filters_and_conditions_of_the_endpoint_decide(db: psycopg.Connection[Any]) -> None:
    asked = {
        "equals": '{"payload": {"a": {"b": 1}, "c": "x"}, "key": "k"}',
        "filter": "$.payload.n > $least",
        "params": '{"least": 1}',
        "condition": "(e.payload ->> 'n')::int < (s.params ->> 'least')::int + 3",
    }
    create(db, "shared", **asked)
    create(db, "own", batch=5, **asked)
    for n in range(6):
        for b, c, key in ((1, "x", "k"), (2, "x", "k"), (1, "y", "k"), (1, "x", "l")):
            payload = f'{{"a": {{"b": {b}}}, "c": "{c}", "n": {n}}}'
            db.execute("select pgmb.publish('t', %s::json, key => %s)", [payload, key])
    for name in ("shared", "own"):
        with refused("MB024"):
            db.execute("select pgmb.replay(%s, %s)", [name, BEGINNING])
        with db.transaction():
            db.execute("set local statement_timeout = '1min'")
            assert value(db, "select pgmb.replay(%s, %s)", name, BEGINNING) == 2
    for replayed in (deliveries(db), retries(db)):
        assert sorted(event.payload["n"] for event in replayed) == [2, 3]


def test_a_replay_that_cannot_be_whole_is_refused(db: psycopg.Connection[Any]) -> None:
    create(db, "hook")
    long_ago = moment(db)
    publish(db, 1)
    deliver(db)
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    db.execute("select pgmb.rotate()")
    for _ in range(2):
        db.execute("select pgmb.maintain()")
    publish(db, 2)
    assert value(db, "select count(*) from pgmb.segment where dropped_at is not null") == 1
    with refused("MB012"):
        db.execute("select pgmb.replay('hook', %s)", [long_ago])
    assert value(db, "select pgmb.replay('hook', '-infinity')") == 1
    assert value(db, "select pgmb.replay('hook', clock_timestamp())") == 0


def test_what_makes_no_sense_is_refused(db: psycopg.Connection[Any]) -> None:
    create(db, "hook")
    db.execute("select pgmb.worker('unfed', 'http://localhost/', 1)")
    for arguments, sqlstate in (
        ("'none', now()", "MB060"),
        ("'unfed', now()", "MB002"),
        ("'hook', null", "MB005"),
        ("'hook', now(), topic => 'a*'", "MB007"),
        ("'hook', now(), filter => '$.payload >'", "MB009"),
    ):
        with refused(sqlstate):
            db.execute(f"select pgmb.replay({arguments})")
    with refused("MB002"):
        db.execute("select pgmb.resend('unfed', '{}')")
    with refused("MB060"):
        db.execute("select pgmb.redrive_failed('none')")


def test_what_failed_since_a_time_is_tried_again_at_once(
    db: psycopg.Connection[Any], fed: tuple[UUID, str]
) -> None:
    endpoint, queue = fed
    create(db, "other", "{a.*}", queue="others")
    keys = iter("pqrstuvw")

    def fail(name: int, *, last: bool) -> None:
        publish(db, name, topic="a.b", key=next(keys))
        for of, whose in (
            (queue, endpoint),
            ("others", value(db, "select id from pgmb.endpoints where name = 'other'")),
        ):
            while not (got := receive(db, of)):
                pass
            settle(db, got.lease, None, [(got.seqs(name)[0], whose, "1 hour", "status 500", True, last)])

    fail(1, last=True)
    since = moment(db)
    fail(2, last=True)
    fail(3, last=False)
    assert value(db, "select pgmb.redrive_failed('hook', %s)", since) == 2
    assert due(db, queue) == {2: 1, 3: 2}
    assert value(db, "select pgmb.redrive_failed('hook')") == 1
    assert due(db, queue) == {1: 1}
    assert sorted(row[1] for row in dead(db)) == [1, 2], "another's are left alone"
    assert [row[1] for row in waiting(db)] == [3]


def test_only_admins_replay(db: psycopg.Connection[Any], cast: Cast) -> None:
    create(db, "hook")
    plain = cast.acting(cast.role("plain", "pgmb_publisher", "pgmb_consumer"))
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    for call in ("resend('hook', '{}')", "replay('hook', now())", "redrive_failed('hook')"):
        forbidden(plain, f"select pgmb.{call}")
        assert value(admin, f"select pgmb.{call}") == 0
