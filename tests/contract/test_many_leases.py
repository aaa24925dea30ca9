"""Limits and order hold however many leases are in flight.

A receive reads the newest claims alone. Older leases that are still in flight are noted; these tests hold so
many that most are.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import age_leases, drain, expire_all, fail, hold_leases, leases_noted, publish, receive

Connection = psycopg.Connection[Any]

MANY = 70
"""More than twice as many as a receive reads."""
ORDERED = "select pgmb.create_queue('q', ordered => true, shards => 1)"


def keys(number: int = MANY) -> list[str]:
    return [f"key {n}" for n in range(number)]


def take(db: Connection, most: int = 1000) -> list[int]:
    """The numbers of what a receive gives that comes when all leases are a while old."""
    age_leases(db)
    return [
        seq for (seq,) in db.execute("select seq from pgmb.receive('q', %s, '1 hour')", [most]).fetchall()
    ]


@pytest.mark.parametrize("kind", ["", ", fair_by => 'key'", ", ordered => true, shards => 1"])
def test_a_limit_holds_beside_many_leases(db: Connection, kind: str) -> None:
    db.execute(f"select pgmb.create_queue('q', max_in_flight => {MANY}{kind})".encode())
    publish(db, MANY * 2, keys=keys(MANY * 2))
    held = hold_leases(db, MANY)
    assert leases_noted(db) > 0
    assert take(db) == []
    db.execute("select pgmb.ack(lease) from unnest(%s::uuid[]) lease", [held[:3]])
    assert len(take(db)) == 3, "the oldest leases ended"
    assert take(db) == []
    db.execute("select pgmb.ack(%s)", [held[-1]])
    assert len(take(db)) == 1, "one of the newest ended"
    assert take(db) == []


def test_events_settled_one_by_one_make_room_beside_many_leases(db: Connection) -> None:
    db.execute(f"select pgmb.create_queue('q', max_in_flight => {MANY * 2})".encode())
    publish(db, MANY * 3)
    first = hold_leases(db, MANY, size=2)[0]
    assert take(db) == []
    assert db.execute("select pgmb.ack(%s, '{1}')", [first]).fetchone() == (1,)
    assert len(take(db)) == 1
    assert take(db) == []


def test_many_leases_of_dead_consumers_make_room(db: Connection) -> None:
    db.execute(f"select pgmb.create_queue('q', max_in_flight => {MANY})".encode())
    publish(db, MANY * 2)
    hold_leases(db, MANY)
    expire_all(db)
    again = 0
    while got := take(db):
        again += len(got)
        assert again <= MANY
    assert again == MANY


def test_a_limit_holds_beside_many_leases_of_retries(db: Connection) -> None:
    db.execute(f"select pgmb.create_queue('q', max_in_flight => {MANY})".encode())
    publish(db, MANY * 2)
    fail(db, *hold_leases(db, MANY))
    held = hold_leases(db, MANY)
    assert take(db) == []
    db.execute("select pgmb.ack(%s)", [held[0]])
    assert len(take(db)) == 1
    assert take(db) == []


@pytest.mark.parametrize("retried", [False, True])
def test_a_key_comes_once_at_a_time_beside_many_leases(db: Connection, retried: bool) -> None:
    db.execute(ORDERED)
    publish(db, MANY, keys=keys())
    if retried:
        fail(db, *hold_leases(db, MANY))
    held = hold_leases(db, MANY)
    assert leases_noted(db) > 0
    publish(db, MANY, keys=keys())
    assert take(db) == []
    db.execute("select pgmb.ack(%s)", [held[0]])
    assert take(db) == [MANY + 1] if not retried else len(take(db)) == 1
    db.execute("select pgmb.retry(%s, after => '0')", [held[1]])
    assert len(take(db)) in (1, 2), "the retried event, perhaps with the one behind it"
    assert take(db) == []


def test_an_event_waits_for_its_key_beside_many_leases(db: Connection) -> None:
    """A retry does not overtake the lease that holds its key, and nothing overtakes the retry."""
    db.execute(ORDERED)
    publish(db, MANY, keys=keys())
    publish(db, 1, keys=["key 0"])
    first, *others = hold_leases(db, MANY)
    db.execute("select pgmb.ack(lease) from unnest(%s::uuid[]) lease", [others])
    assert take(db) == []
    db.execute("select pgmb.retry(%s, after => '0')", [first])
    got: list[int] = []
    while more := take(db):
        got += more
    assert got == [1, MANY + 1]


def test_noted_leases_are_forgotten_when_they_end(db: Connection) -> None:
    """What is kept of leases in flight goes with them, although some lease stays in flight."""
    db.execute(ORDERED)
    publish(db, MANY * 3, keys=keys(MANY * 3))
    first, *others = hold_leases(db, MANY)
    noted = leases_noted(db)
    assert noted > 0
    db.execute("select pgmb.ack(lease) from unnest(%s::uuid[]) lease", [others])
    for _ in range(2):
        others = hold_leases(db, MANY)
        db.execute("select pgmb.ack(lease) from unnest(%s::uuid[]) lease", [others])
    age_leases(db)
    receive(db)
    db.execute("select pgmb.clear_settled()")
    assert leases_noted(db) < 2 * noted
    db.execute("select pgmb.ack(%s)", [first])
    drain(db)


def test_a_superseded_receive_that_noted_leases_does_not_commit(sessions: Sessions) -> None:
    """Its notes would count with the position of those that went on without it."""
    admin, slow, other = sessions["admin"], sessions["slow"], sessions["other"]
    db = admin.connection
    admin.run(f"select pgmb.create_queue('q', max_in_flight => {MANY})")
    publish(db, MANY * 2)
    held: list[UUID] = hold_leases(db, 32)
    noted = leases_noted(db)
    slow.run("begin")
    while leases_noted(slow.connection) == noted:
        slow.run("select from pgmb.receive('q', 1)")
    assert len(other.run("select from pgmb.receive('q', 1)")) == 1, "after a second"
    with pytest.raises(psycopg.Error) as refused:
        slow.run("commit")
    assert refused.value.sqlstate == "MB011"
    assert len(hold_leases(db, MANY - len(held) - 1)) == MANY - len(held) - 1
    assert receive(db) is None
