"""Promise: status shows as waiting what a receive gives, and since when a receive would have given it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from harness.states import age_waiting, expire_all, fail, hold_leases, publish
from pgmb import schema
from tests.contract.endpoints import value

DB = psycopg.Connection[Any]
LONG = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Shown:
    """What each of the calls says of one queue."""

    waiting: int
    oldest: timedelta | None
    leased: int
    retries: int
    depth: int
    next: int
    waiting_for: timedelta | None


def shown(db: DB, queue: str = "q") -> Shown:
    waiting, oldest, leased, retries = db.execute(
        "select waiting, oldest_age, leased_events, retries from pgmb.queue_status where queue = %s", [queue]
    ).fetchall()[0]
    return Shown(
        waiting,
        oldest,
        leased,
        retries,
        value(db, "select pgmb.queue_depth(%s)", queue),
        len(value(db, "select pgmb.next_events(%s, 200)", queue)["events"]),
        value(db, "select waiting_for from pgmb.queue_health() where queue = %s", queue),
    )


def received(db: DB, queue: str = "q") -> int:
    """How many events a consumer gets."""
    return len(db.execute("select from pgmb.receive(%s, 1000)", [queue]).fetchall())


def test_retries_that_are_due_wait(db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 3)
    fail(db, *hold_leases(db, 3), after="1 hour")
    assert shown(db).oldest is None
    assert shown(db).waiting_for is None
    age_waiting(db, "90 minutes")
    now = shown(db)
    assert now.oldest is not None
    assert now.waiting_for is not None
    assert LONG <= now.oldest < LONG * 2
    assert LONG <= now.waiting_for < LONG * 2
    assert (now.retries, now.depth, now.next) == (3, 3, 3)
    assert received(db) == 3


def test_redriven_dead_letters_wait(db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 3)
    for lease in hold_leases(db, 3):
        db.execute("select pgmb.bury(%s)", [lease])
    assert shown(db).oldest is None
    db.execute("select pgmb.redrive('q')")
    now = shown(db)
    assert (now.oldest is not None, now.waiting_for is not None, now.depth, now.next) == (True, True, 3, 3)
    assert received(db) == 3


def test_events_of_a_dead_consumer_wait(db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 3)
    hold_leases(db, 3)
    held = shown(db)
    assert (held.oldest, held.leased, held.waiting_for) == (None, 3, None)
    expire_all(db)
    now = shown(db)
    assert (now.oldest is not None, now.waiting_for is not None, now.leased, now.next) == (True, True, 0, 3)
    assert received(db) == 3


def test_a_full_queue_shows_what_it_delivers(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', max_length => 10, when_full => 'drop_oldest')")
    publish(db, 90)
    time.sleep(0.2)
    publish(db, 10)
    now = shown(db)
    assert (now.waiting, now.depth, now.next) == (10, 10, 10)
    assert now.oldest is not None
    assert now.waiting_for is not None
    # The oldest that it drops are older.
    assert now.oldest < now.waiting_for + timedelta(seconds=0.2)
    first = value(
        db, "select min((e ->> 'seq')::bigint) from json_array_elements(pgmb.next_events('q') -> 'events') e"
    )
    assert first == 91
    assert received(db) == 10


def test_what_a_ttl_gives_up_does_not_wait(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', ttl => '1 second')")
    publish(db, 5)
    time.sleep(1.1)
    publish(db, 2)
    now = shown(db)
    assert (now.waiting, now.depth, now.next) == (2, 2, 2)
    assert now.oldest is not None
    assert now.waiting_for is not None
    assert max(now.oldest, now.waiting_for) < timedelta(seconds=1)
    assert received(db) == 2


@pytest.mark.parametrize("size", [1, 20])
def test_messages_of_pgmq_wait_until_they_are_read(db: DB, dsn: str, size: int) -> None:
    """Small reads park messages in a table of PGMQ's functions, large ones hold a lease that does not end."""
    schema.install(dsn, compat=["pgmq"])
    db.execute("select pgmq.create('q')")
    db.execute("select pgmq.send_batch('q', array_fill('{}'::jsonb, array[60]))")
    queue = value(db, "select stream from pgmq.queue")

    def visible() -> int:
        return int(value(db, "select queue_visible_length from pgmq.metrics('q')"))

    assert shown(db, queue).waiting == shown(db, queue).depth == visible() == 60
    db.execute("select pgmq.read('q', 2, %s)", [size])
    now = shown(db, queue)
    assert now.waiting == now.depth == now.next == visible() == 60 - size
    assert now.leased == size
    assert (now.oldest is not None, now.waiting_for is not None) == (True, True)
    db.execute("select pgmq.delete('q', array[1, 59]::bigint[])")
    now = shown(db, queue)
    assert now.waiting == now.depth == now.next == visible() == 59 - size
    assert now.leased == size - 1
    time.sleep(2.1)
    now = shown(db, queue)
    assert now.waiting == now.depth == now.next == visible() == 58
    assert now.leased == 0


def test_a_queue_whose_messages_are_all_read_or_deleted_is_empty(db: DB, dsn: str) -> None:
    schema.install(dsn, compat=["pgmq"])
    db.execute("select pgmq.create('q')")
    db.execute("select pgmq.send_batch('q', array_fill('{}'::jsonb, array[30]))")
    db.execute("select pgmq.delete('q', array(select n from generate_series(11, 30) n)::bigint[])")
    db.execute("select pgmq.read('q', 60, 30)")
    now = shown(db, value(db, "select stream from pgmq.queue"))
    assert (now.waiting, now.depth, now.next, now.oldest, now.waiting_for) == (0, 0, 0, None, None)
    assert now.leased == 10


_FIGURES = """
select json_build_object('events', s.events, 'behind', q.behind, 'dead letters', b.dead_letters,
  'unticked', h.unticked)
from pgmb.stream_status s, pgmb.queue_status q, pgmb.describe_broker() b, pgmb.stream_health() h
"""


def test_no_figure_follows_a_sequence(db: DB) -> None:
    """After a crash sequences are ahead of every event that there is."""
    db.execute("select pgmb.create_queue('q', max_attempts => 1)")
    db.execute("select pg_stat_force_next_flush()")
    dead = value(db, _FIGURES)["dead letters"]
    publish(db, 5)
    for lease in hold_leases(db, 5):
        db.execute("select pgmb.bury(%s)", [lease])
    db.execute("select pg_stat_force_next_flush()")
    before = value(db, _FIGURES)
    assert (before["events"], before["behind"], before["dead letters"]) == (5, 0, dead + 5)
    db.execute("select nextval('pgmb.seq_main'), nextval('pgmb.dead_id_seq') from generate_series(1, 32)")
    assert value(db, _FIGURES) == before
