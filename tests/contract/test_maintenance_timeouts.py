"""Promise: maintain() gets all work done under a short statement_timeout, in more calls."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import age_leases, fill, settled_singly
from harness.states.running import value

MOST_CALLS = 100
SHORT = "600 ms"


def make_slow(db: psycopg.Connection[Any], table: str, seconds: float, of: str = "true") -> None:
    """Each row that is deleted from a table takes that long: more than one call is needed on any machine."""
    db.execute(
        "create or replace function pgmb.delay() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(tg_argv[0]::float8); return old; end $$"
    )
    db.execute(
        f"create trigger delay before delete on pgmb.{table} for each row when ({of})"
        f" execute function pgmb.delay({seconds})".encode()
    )


def maintain(db: psycopg.Connection[Any], timeout: str = SHORT) -> int:
    """Call maintain() under a statement_timeout until nothing is left. Returns the number of calls."""
    db.execute("select set_config('statement_timeout', %s, false)", [timeout])
    calls = 1
    while value(db, "select pgmb.maintain()"):
        calls += 1
        assert calls < MOST_CALLS
    db.execute("reset statement_timeout")
    return calls


def settle_singly(db: psycopg.Connection[Any], leases: int, size: int) -> None:
    """Leases of `size` events, of which nearly all are acked apart from the rest of their lease."""
    fill(db, leases * size)
    for _ in range(leases):
        rows = db.execute("select lease, seq from pgmb.receive('q', %s)", [size]).fetchall()
        db.execute("select pgmb.ack(%s, %s)", [rows[0][0], [seq for _, seq in rows[1:]]])
        db.execute("select pgmb.ack(%s)", [rows[0][0]])
    age_leases(db)


@pytest.mark.parametrize("size", [20, 500])
def test_settlements_that_take_longer_than_the_timeout_are_cleared(
    db: psycopg.Connection[Any], size: int
) -> None:
    db.execute("select pgmb.create_queue('q')")
    settle_singly(db, 3000 // size, size)
    before = settled_singly(db)
    assert before >= 2700
    make_slow(db, "settlement", 0.001, of="old.seq % 10 = 0")
    assert maintain(db, "300 ms") > 1
    # Those of the queue's position stay.
    assert settled_singly(db) <= size
    assert value(db, "select failing from pgmb.describe_broker()") is None


def add_rows_of_many_steps(db: psycopg.Connection[Any]) -> list[str]:
    db.execute("insert into pgmb.endpoint (name, url) values ('e', 'https://endpoint.example/')")
    db.execute("select pgmb.publish('t', '1', dedup_key => 'k', dedup_for => '1 microsecond')")
    db.execute("select pgmb.publish('t', '1', delay => '1 microsecond')")
    db.execute("select pgmb.subscribe('g', expires_after => '1 microsecond')")
    db.execute("insert into pgmb.audit (at, actor, action) values (now() - interval '1 year', 'a', 'b')")
    db.execute(
        "insert into pgmb.attempt (endpoint, at, attempt, seconds)"
        " select id, now() - interval '1 year', 1, 0 from pgmb.endpoint"
    )
    return ["dedup", "delayed", "subscription", "audit", "attempt"]


def test_steps_that_take_longer_than_the_timeout_together_take_turns(db: psycopg.Connection[Any]) -> None:
    tables = add_rows_of_many_steps(db)
    for table in tables:
        make_slow(db, table, 0.2)
    assert maintain(db) >= len(tables)
    assert {table: value(db, f"select count(*) from pgmb.{table}") for table in tables} == dict.fromkeys(
        tables, 0
    )
    assert value(db, "select failing from pgmb.describe_broker()") is None


def test_a_step_that_never_ends_in_time_costs_that_step_alone(db: psycopg.Connection[Any]) -> None:
    tables = add_rows_of_many_steps(db)
    make_slow(db, "dedup", 60)
    db.execute("set client_min_messages = error")
    db.execute("select set_config('statement_timeout', %s, false)", [SHORT])
    left = set(tables)
    calls = 0
    while left != {"dedup"} or value(db, "select failing from pgmb.describe_broker()") is None:
        db.execute("select pgmb.maintain()")
        left = {table for table in tables if value(db, f"select count(*) from pgmb.{table}")}
        calls += 1
        assert calls < MOST_CALLS
    db.execute("reset statement_timeout")
    assert value(db, "select failing from pgmb.describe_broker()") == [
        "dedup keys: canceling statement due to statement timeout (57014)"
    ]
    db.execute("drop trigger delay on pgmb.dedup")
    maintain(db)
    assert value(db, "select count(*) from pgmb.dedup") == 0
    assert value(db, "select failing from pgmb.describe_broker()") is None


def test_a_user_can_cancel_a_call(sessions: Sessions) -> None:
    admin, janitor = sessions.open("admin", "janitor")
    add_rows_of_many_steps(admin.connection)
    make_slow(admin.connection, "dedup", 60)
    pid = janitor.value("select pg_backend_pid()")
    call = janitor.start("select pgmb.maintain()")
    while admin.value("select wait_event from pg_stat_activity where pid = %s", [pid]) != "PgSleep":
        pass
    janitor.cancel()
    with pytest.raises(psycopg.errors.QueryCanceled):
        call.result()
    assert admin.value("select count(*) from pgmb.dedup") == 1
