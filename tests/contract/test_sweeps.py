"""Promise: leases that expire together stop no queue: each receive ends some of them, within its time."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from harness.states import slow_down

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
