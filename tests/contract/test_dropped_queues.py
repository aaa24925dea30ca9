"""Rows that transactions add to a queue while it is dropped do not stay."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import hold_leases, left_of_dropped_queues, publish
from pgmb.erasure import Eraser

pytestmark = pytest.mark.new_database

KEY = "person-4711"


def leave_rows(sessions: Sessions, db: psycopg.Connection[Any]) -> None:
    """A queue is dropped while a transaction is open that received from it and settled a part."""
    db.execute("select pgmb.create_queue('q', lease_for => '1 hour')")
    publish(db, 5, keys=[KEY])
    consumer = sessions["consumer"]
    consumer.run("begin")
    rows = consumer.run("select lease, seq from pgmb.receive('q', 4)")
    lease, seqs = rows[0][0], [row[1] for row in rows]
    consumer.run("select pgmb.ack(%s, %s)", [lease, seqs[:1]])
    consumer.run("select pgmb.retry(%s, %s)", [lease, seqs[1:2]])
    consumer.run("select pgmb.extend(%s, '1 minute')", [lease])
    assert db.execute("select pgmb.drop_queue('q')").fetchall() == [(True,)]
    consumer.run("commit")


def test_maintenance_removes_rows_of_a_queue_dropped_beside_a_receive(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('kept', lease_for => '1 hour')")
    leave_rows(sessions, db)
    assert left_of_dropped_queues(db) == {
        "leases": 1,
        "events settled singly": 2,
        "retries": 1,
        "leases behind a sweep": 1,
    }
    held = hold_leases(db, 1, "kept")
    db.execute("select pgmb.maintain()")
    assert left_of_dropped_queues(db) == {}
    assert db.execute("select pgmb.ack(%s)", held).fetchall() == [(1,)], "other queues keep their leases"


def test_erasure_finds_rows_of_a_dropped_queue(
    sessions: Sessions, db: psycopg.Connection[Any], dsn: str
) -> None:
    leave_rows(sessions, db)
    done = Eraser(dsn, [KEY]).erase("request 17")
    assert {table.name: table.events for table in done.tables}["pgmb.retry"] == 1
    assert "retries" not in left_of_dropped_queues(db)
