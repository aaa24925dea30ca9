"""Promise: maintain() does a bounded amount of work a call, and a step that fails costs that step alone."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from harness.sessions import Sessions
from harness.states import noted_generation, open_generation

ABOUT_AT_ONCE = 20
"""Seconds that a busy machine may take for what waits for nothing."""


def failing(db: psycopg.Connection[Any]) -> list[str] | None:
    row = db.execute("select failing from pgmb.describe_broker()").fetchone()
    assert row is not None
    steps: list[str] | None = row[0]
    return steps


def fill_segments(db: psycopg.Connection[Any], number: int) -> None:
    """Sealed segments, all of which retention may drop."""
    db.execute("select pgmb.alter_stream('main', rotate_every => '0 s')")
    for _ in range(number):
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.rotate()")
    while db.execute("select pgmb.seal()").fetchone() != (0,):
        pass
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '1 day')")


def count(db: psycopg.Connection[Any], condition: str) -> int:
    row = db.execute(f"select count(*) from pgmb.segment g where {condition}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_a_failing_step_costs_that_step_alone(db: psycopg.Connection[Any]) -> None:
    warnings: list[str] = []
    db.add_notice_handler(lambda diagnostic: warnings.append(diagnostic.message_primary or ""))
    fill_segments(db, 2)
    db.execute("select pgmb.publish('t', '1', dedup_key => 'k', dedup_for => '1 microsecond')")
    db.execute(
        "create function pgmb.refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'out of order'; end $$"
    )
    db.execute(
        "create trigger refuse before delete on pgmb.dedup for each row execute function pgmb.refuse()"
    )
    db.execute("select pgmb.maintain()")
    assert failing(db) == ["dedup keys: out of order (P0001)"]
    assert warnings == ["maintenance: step dedup keys failed: out of order (P0001)"]
    assert count(db, "g.dropped_at is not null") >= 1, "retention is a later step"
    db.execute("drop trigger refuse on pgmb.dedup")
    db.execute("select pgmb.maintain()")
    assert failing(db) is None
    assert db.execute("select from pgmb.dedup").fetchall() == []


def test_maintenance_waits_for_no_row_that_others_hold(sessions: Sessions) -> None:
    """As after the calls of a reader or a consumer in a transaction that stays open."""
    admin, holder, janitor = sessions.open("admin", "holder", "janitor")
    fill_segments(admin.connection, 2)
    admin.run("select pgmb.create_queue('q')")
    admin.run("select pgmb.create_queue('late')")
    admin.run("select pgmb.subscribe('g', expires_after => '1 microsecond')")
    open_generation(admin, "late")
    admin.run("select pgmb.alter_stream('main', rotate_every => '0 s')")
    admin.run("select pgmb.publish('t', '1')")
    tables = admin.run(
        "select relname from pg_class where relnamespace = 'pgmb'::regnamespace and relkind = 'r'"
        " and relname !~ '^(segment_.*|stage_.*|segment|stream|history)$' order by relname"
    )
    holder.run("begin")
    for (table,) in tables:
        holder.run(sql.SQL("select from {} for update").format(sql.Identifier("pgmb", table)))
    janitor.run(f"set statement_timeout = '{ABOUT_AT_ONCE}s'")
    newest = admin.value("select max(number) from pgmb.segment where closed_at is not null")
    janitor.run("select pgmb.maintain()")
    assert count(admin.connection, "g.dropped_at is not null") >= 1
    assert admin.value("select max(number) from pgmb.segment where closed_at is not null") == newest + 1
    holder.run("rollback")
    janitor.run("select pgmb.maintain()")
    assert failing(admin.connection) is None
    assert noted_generation(admin, "late") == 1
    assert admin.run("select from pgmb.subscription") == []


def test_a_call_does_a_bounded_amount_of_work_and_tells_whether_more_is_left(
    db: psycopg.Connection[Any],
) -> None:
    fill_segments(db, 60)
    assert db.execute("select pgmb.drop_segments(max => 1)").fetchone() == (1,)
    calls = 1
    while db.execute("select pgmb.maintain()").fetchone() == (True,):
        calls += 1
        assert calls < 100
    assert calls > 1, "60 segments are more than a call drops"
    assert count(db, "g.dropped_at is null and g.sealed_at is not null") == 0
    assert failing(db) is None


def test_a_call_over_many_streams_ends_after_a_second_and_the_next_ones_do_the_rest(
    db: psycopg.Connection[Any],
) -> None:
    """Where each takes as long as on a busy machine, fifteen are not done in one call."""
    streams = [f"s{number}" for number in range(15)]
    for stream in streams:
        db.execute("select pgmb.create_stream(%s, rotate_every => '0 s')", [stream])
        db.execute("select pgmb.publish('t', '1', stream => %s)", [stream])
    db.execute(
        "create function pgmb.delay() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.2); return new; end $$"
    )
    db.execute(
        "create trigger delay before update on pgmb.segment for each row"
        " when (old.closed_at is null and new.closed_at is not null) execute function pgmb.delay()"
    )
    assert db.execute("select pgmb.maintain()").fetchone() == (True,)
    rotated = count(db, "g.closed_at is not null")
    assert 0 < rotated < len(streams)
    db.execute("drop trigger delay on pgmb.segment")
    calls = 1
    while db.execute("select pgmb.maintain()").fetchone() == (True,):
        calls += 1
        assert calls < 100
    assert count(db, "g.closed_at is not null and g.number = 0") == len(streams)
    assert failing(db) is None
