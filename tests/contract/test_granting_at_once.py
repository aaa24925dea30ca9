"""Promise: sessions that create streams or grant rights at once wait for each other, but not for long."""

from __future__ import annotations

import time

import psycopg
import pytest

from harness.sessions import Sessions

ABOUT_AT_ONCE = 20
"""Seconds that a busy machine may take for what waits for nothing."""


def test_streams_are_created_and_rights_granted_by_several_sessions_at_once(sessions: Sessions) -> None:
    first, second = sessions.open("first", "second")
    first.run("select pgmb.create_queue('q')")
    role = f"at_once_{first.pid}"
    first.run(f"create role {role}")
    calls = [
        ("create_stream('a')", "create_stream('b')"),
        (f"grant_publish('a', '{role}')", f"grant_read('b', '{role}')"),
        (f"grant_consume('q', '{role}')", "create_stream('c')"),
    ]
    for one, other in calls:
        first.run("begin")
        first.run(f"select pgmb.{one}")
        running = second.start(f"select pgmb.{other}")
        give_up = time.monotonic() + ABOUT_AT_ONCE
        while not second.waits_for_lock():
            assert time.monotonic() < give_up
        first.run("commit")
        running.result(ABOUT_AT_ONCE)
    first.run(f"drop owned by {role}")
    first.run(f"drop role {role}")


def test_a_stream_is_not_waited_for_that_is_created_in_a_transaction_that_stays_open(
    sessions: Sessions,
) -> None:
    first, second = sessions.open("first", "second")
    first.run("begin")
    first.run("select pgmb.create_stream('a')")
    with pytest.raises(psycopg.Error) as refused:
        second.start("select pgmb.create_stream('b')").result(ABOUT_AT_ONCE)
    assert refused.value.sqlstate == "MB004"
    first.run("rollback")
    second.run("select pgmb.create_stream('b')")
