"""Retention by default: seven days, and longer for what a queue or a durable reader has not passed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg

from harness.segments import seal
from harness.states import age_segments, hold_leases, publish

SEGMENTS = "select count(*) from pgmb.segment where sealed_at is not null and dropped_at is null"


def value(db: psycopg.Connection[Any], statement: str) -> Any:
    row = db.execute(statement.encode()).fetchone()
    return None if row is None else row[0]


def age(db: psycopg.Connection[Any], by: str) -> None:
    """Make the first segment a sealed one that is as old, and maintain."""
    if value(db, SEGMENTS) == 0:
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.rotate()")
        db.execute("select pgmb.maintain()")
        assert value(db, SEGMENTS) == 1
    age_segments(db, by)
    db.execute("select pgmb.maintain()")


def test_the_stream_main_and_new_streams_keep_a_week(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('s'), pgmb.create_stream('all', keep_for => null)")
    db.execute("select pgmb.create_stream('off', keep_for => '-1 s')")
    kept = dict(db.execute("select name, keep_for from pgmb.stream").fetchall())
    week = timedelta(days=7)
    assert kept == {"main": week, "s": week, "all": None, "off": None}


def test_what_all_have_read_is_dropped_after_a_week(db: psycopg.Connection[Any]) -> None:
    age(db, "6 days 23 hours")
    assert value(db, SEGMENTS) == 1
    age(db, "2 hours")
    assert value(db, SEGMENTS) == 0


def test_what_a_queue_or_a_durable_reader_has_not_read_stays(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    age(db, "100 days")
    assert value(db, SEGMENTS) == 1
    lease = value(db, "select lease from pgmb.receive('q')")
    age(db, "1 day")
    assert value(db, SEGMENTS) == 1
    db.execute("select pgmb.ack(%s)", [lease])
    # The queue's position moves past a batch with the next receive.
    db.execute("select * from pgmb.receive('q')")
    age(db, "1 day")
    assert value(db, SEGMENTS) == 1
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    age(db, "1 day")
    assert value(db, SEGMENTS) == 0


def test_overlapping_leases_of_a_queue_that_keeps_up_hold_only_their_own_segments(
    db: psycopg.Connection[Any],
) -> None:
    """Each lease is acked while the next one is held, so that there is a lease at any time."""
    db.execute("select pgmb.alter_stream('main', keep_for => '0')")
    db.execute("select pgmb.create_queue('q')")
    before = None
    for _ in range(6):
        publish(db, 3)
        (lease,) = hold_leases(db, 1, size=10)
        if before is not None:
            db.execute("select pgmb.ack(%s)", [before])
        before = lease
        seal(db)
        db.execute("select pgmb.maintain()")
    assert value(db, SEGMENTS) <= 3
