"""A restricted operation of PostgreSQL that runs functions of pgmb is refused.

What the owner of a table tries in such operations is in tests/adversary/test_any_table_owner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.conftest import FreshServer


def test_a_materialized_view_of_pgmb_is_refused(db: psycopg.Connection[Any]) -> None:
    """Nothing tells whose definition it is. A view, or a table that is filled by the caller, works."""
    db.execute("select pgmb.create_queue('q')")
    assert_refused(db, "create materialized view depths as select queue, waiting from pgmb.queue_status")
    db.execute("create table depths as select queue, waiting from pgmb.queue_status")
    assert db.execute("select queue from depths").fetchall() == [("q",)]


def test_it_is_refused_where_no_transaction_can_be_prepared(
    fresh_server: FreshServer, install: Callable[[str], None]
) -> None:
    """PostgreSQL's default, where receive and ack detect a restricted operation in another way."""
    server = fresh_server(settings={"max_prepared_transactions": 0})
    install(server.dsn())
    with psycopg.connect(server.dsn(), autocommit=True) as db:
        db.execute("select pgmb.create_queue('q')")
        for call in ("pgmb.receive('q')", "pgmb.queue_status"):
            assert_refused(db, f"create materialized view copied as select * from {call}")
        db.execute("listen anything")
        assert db.execute("select * from pgmb.receive('q')").fetchall() == []
        assert db.execute("select * from pg_listening_channels()").fetchall() == [("anything",)]


def test_a_session_that_listens_may_prepare_what_it_received(db: psycopg.Connection[Any]) -> None:
    db.execute("listen anything")
    db.execute("unlisten *")
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('a', '1')")
    db.execute("begin")
    assert len(db.execute("select * from pgmb.receive('q')").fetchall()) == 1
    db.execute("prepare transaction 'received'")
    db.execute("rollback prepared 'received'")


def assert_refused(db: psycopg.Connection[Any], statement: str) -> None:
    with pytest.raises(psycopg.Error, match=r"restricted operation|cannot tell which role") as refusal:
        db.execute(statement)
    assert refusal.value.sqlstate in ("42501", "MB042")
    assert "cannot tell which role calls it" in f"{refusal.value} {refusal.value.diag.context}"
