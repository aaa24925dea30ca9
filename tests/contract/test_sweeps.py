"""Promise: leases that expire together stop no queue: each receive ends some of them, within its time."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import slow_down
from harness.states.leases import age_leases, expire_all, leases_left_by_sweeps, newest_claim

LEASES, EVENTS = 8, 2

KINDS = {"plain": "", "ordered": ", ordered => true, shards => 1", "fair": ", fair_by => 'key'"}


def delay_writes(db: psycopg.Connection[Any]) -> None:
    """Every statement that gives events back takes 0.3 s, as one of 10,000 events does where much is done."""
    slow_down(db, 0.3)


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("ordered", marks=pytest.mark.minutes),
        pytest.param("fair", marks=pytest.mark.minutes),
    ],
)
def test_many_leases_that_expire_together_come_again_under_a_statement_timeout(
    db: psycopg.Connection[Any], kind: str
) -> None:
    db.execute(f"select pgmb.create_queue('q'{KINDS[kind]})".encode())
    for number in range(LEASES * EVENTS):
        db.execute("select pgmb.publish('t', to_json(%s::int), key => %s)", [number, f"k{number}"])
    held = 0
    give_up = time.monotonic() + 60
    while held < LEASES * EVENTS:
        held += len(db.execute("select from pgmb.receive('q', %s, '3 s')", [EVENTS]).fetchall())
        assert time.monotonic() < give_up
    time.sleep(3.2)
    delay_writes(db)
    db.execute("set statement_timeout = '2s'")
    again: list[Any] = []
    while len(again) < LEASES * EVENTS:
        rows = db.execute("select lease, payload, attempt from pgmb.receive('q', 100, '60 s')").fetchall()
        again += [(payload, attempt) for _, payload, attempt in rows]
        if rows:
            db.execute("select pgmb.ack(%s)", [rows[0][0]])
        assert time.monotonic() < give_up, again
    assert sorted(again) == [(number, 2) for number in range(LEASES * EVENTS)]


@pytest.mark.minutes
def test_events_of_many_leases_that_had_their_last_attempt_become_dead_letters_under_a_statement_timeout(
    db: psycopg.Connection[Any],
) -> None:
    """No event is due again: the receives that end leases come back with nothing and keep their progress."""
    db.execute("select pgmb.create_queue('q', max_attempts => 1)")
    for number in range(LEASES * EVENTS):
        db.execute("select pgmb.publish('t', to_json(%s::int))", [number])
    for _ in range(LEASES):
        assert len(db.execute("select from pgmb.receive('q', %s, '2 s')", [EVENTS]).fetchall()) == EVENTS
    time.sleep(2.2)
    db.execute("select pgmb.publish('t', '99')")
    delay_writes(db)
    db.execute("set statement_timeout = '2s'")
    give_up = time.monotonic() + 60
    while not (rows := db.execute("select payload from pgmb.receive('q')").fetchall()):
        assert time.monotonic() < give_up
    assert rows == [(99,)]
    assert len(db.execute("select from pgmb.dead_letters('q')").fetchall()) == LEASES * EVENTS


SETTLED = 250
"""Leases that one transaction settles late: more than a sweep reads at a time."""


def settle_many_late(sessions: Sessions) -> tuple[Session, Session]:
    """One session settles expired leases in a transaction that stays open. One more lease has expired.

    No sweep has looked at them. Returns that session and another one.
    """
    holder, other = sessions.open("holder", "other")
    other.run("select pgmb.create_queue('q')")
    other.run("select pgmb.publish('t', to_json(n)) from generate_series(1, %s) n", [SETTLED + 1])
    leases = [
        lease
        for (lease,) in other.run(
            "select r.lease"
            " from generate_series(1, %s) n, lateral pgmb.receive('q', least(n, 1), '1 hour') r",
            [SETTLED + 1],
        )
    ]
    expire_all(other.connection)
    holder.run("begin")
    assert holder.value("select sum(pgmb.ack(lease)) from unnest(%s::uuid[]) lease", [leases[:-1]]) == SETTLED
    return holder, other


def receive(session: Session) -> list[Any]:
    return session.run("select lease, payload, attempt from pgmb.receive('q')")


def test_a_lease_is_taken_over_beside_a_transaction_that_settles_many_late(sessions: Sessions) -> None:
    _, other = settle_many_late(sessions)
    rows = receive(other) or receive(other)
    assert [(payload, attempt) for _, payload, attempt in rows] == [(SETTLED + 1, 2)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_many_leases_settled_late_leave_the_sweep_nothing_to_look_at(sessions: Sessions, end: str) -> None:
    """A sweep writes which leases it leaves, although nothing is received."""
    holder, other = settle_many_late(sessions)
    taken = [payload for _ in range(3) for _, payload, _ in receive(other)]
    assert taken == [SETTLED + 1]
    holder.run(end)
    for _ in range(20):
        taken += [payload for _, payload, _ in receive(other)]
        if len(taken) == (1 if end == "commit" else SETTLED + 1) and not leases_left_by_sweeps(
            other.connection
        ):
            break
    else:
        raise AssertionError(leases_left_by_sweeps(other.connection))
    assert sorted(taken) == list(range(1 if end == "rollback" else SETTLED + 1, SETTLED + 2))
    newest = newest_claim(other.connection)
    assert receive(other) == []
    assert newest_claim(other.connection) == newest, "a receive that finds nothing writes nothing"


@pytest.mark.parametrize("kind", ["ordered => true, shards => 1", "fair_by => 'key', max_in_flight => 1000"])
def test_a_receive_that_finds_nothing_writes_nothing(db: psycopg.Connection[Any], kind: str) -> None:
    """Keys and limits make receives look at leases. To have found that many ended is not worth a position."""
    db.execute(f"select pgmb.create_queue('q', {kind})".encode())
    db.execute("select pgmb.publish('t', to_json(n), key => n::text) from generate_series(1, 70) n")
    leases: list[Any] = []
    while len(leases) < 70:
        leases += [lease for (lease,) in db.execute("select lease from pgmb.receive('q', 1)").fetchall()]
        age_leases(db)
    db.execute("select pgmb.ack(lease) from unnest(%s::uuid[]) lease", [leases])
    assert db.execute("select from pgmb.receive('q')").fetchall() == []
    newest = newest_claim(db)
    assert db.execute("select from pgmb.receive('q')").fetchall() == []
    assert newest_claim(db) == newest, "a receive that finds nothing writes nothing"
