"""Promise: maintain() opens a segment when a stream's limits say so, and not at every call."""

from __future__ import annotations

from typing import Any

import psycopg

SEGMENTS = "select count(*) from pgmb.segment where closed_at is not null"


def value(db: psycopg.Connection[Any], query: str) -> Any:
    row = db.execute(query).fetchone()
    assert row is not None
    return row[0]


def grow_older(db: psycopg.Connection[Any], by: str) -> None:
    """The stream and its segments were made, attached and closed earlier."""
    db.execute("update pgmb.stream set created_at = created_at - %s::interval", [by])
    db.execute(
        "update pgmb.segment set attached_at = attached_at - %(by)s::interval,"
        " closed_at = closed_at - %(by)s::interval",
        {"by": by},
    )


def test_a_stream_older_than_rotate_every_rotates_once_per_period(db: psycopg.Connection[Any]) -> None:
    """Forty calls, with traffic in between, are one rotation; the next comes a period later."""
    grow_older(db, "3 hours")
    for _ in range(40):
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.maintain()")
    assert value(db, SEGMENTS) == 1
    grow_older(db, "2 hours")
    for _ in range(40):
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.maintain()")
    assert value(db, SEGMENTS) == 2


def test_a_young_stream_does_not_rotate(db: psycopg.Connection[Any]) -> None:
    for _ in range(5):
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.maintain()")
    assert value(db, SEGMENTS) == 0


def test_an_idle_stream_does_not_rotate(db: psycopg.Connection[Any]) -> None:
    """An empty segment stays the current one however old it is."""
    db.execute("select pgmb.publish('t', '1')")
    grow_older(db, "3 hours")
    for _ in range(5):
        db.execute("select pgmb.maintain()")
        grow_older(db, "3 hours")
    assert value(db, SEGMENTS) == 1


def test_a_full_segment_rotates_before_its_time(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.alter_stream('main', rotate_events => 10)")
    db.execute("select pgmb.publish_many('t', array_fill('1'::json, array[10]))")
    for _ in range(5):
        db.execute("select pgmb.maintain()")
    assert value(db, SEGMENTS) == 1
