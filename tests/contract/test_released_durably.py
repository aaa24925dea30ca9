"""Promise: a delayed event enters the log once, also when the server crashes right after.

A receive alone in its transaction commits without waiting for the disk: a lost claim only means redelivery.
It also moves due events into the log, where other sessions see them at once. If a crash took that commit
back, the event would be delayed again and enter the log a second time.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.states import sweep_at_once
from tests.conftest import FreshServer

DUE = (
    "insert into pgmb.delayed (id, stream, due_at, topic, payload)"
    " values (gen_random_uuid(), 'main', now(), 't', '1')"
)
COMMITS = "select current_setting('synchronous_commit')"


def value(db: psycopg.Connection[Any], query: Any) -> Any:
    row = db.execute(query).fetchone()
    assert row is not None
    return row[0]


@pytest.fixture
def queues(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.create_queue('plain'), pgmb.create_queue('ordered', ordered => true)")
    db.execute("select pgmb.create_queue('elsewhere', stream => 'other')")
    # The sweep, with which due events are released, takes place every 50 ms.
    sweep_at_once(db)
    db.execute("set synchronous_commit = on")
    return db


@pytest.mark.parametrize(
    "receive",
    [
        "receive('plain', durable => false)",
        "receive('ordered', durable => false)",
        "receive_any('{plain,elsewhere}', durable => false)",
        "receive_any('{elsewhere,plain}', durable => false)",
        "receive_group('plain', durable => false)",
    ],
)
@pytest.mark.parametrize("due", [True, False])
def test_a_receive_that_releases_events_waits_for_the_disk(
    queues: psycopg.Connection[Any], receive: str, due: bool
) -> None:
    if due:
        queues.execute(DUE)
    with queues.transaction():
        queues.execute(f"select from pgmb.{receive}")
        assert value(queues, COMMITS) == ("on" if due else "off")
    assert value(queues, "select count(*) from pgmb.delayed") == 0


def test_it_commits_as_the_session_was_set_up_to(dsn: str, queues: psycopg.Connection[Any]) -> None:
    """Not stricter: a database that waits for no standby goes on not waiting for one."""
    queues.execute(DUE)
    with psycopg.connect(dsn, options="-c synchronous_commit=local") as session:
        session.execute("select from pgmb.receive('plain', durable => false)")
        assert value(session, COMMITS) == "local"


@pytest.mark.crash
def test_a_released_event_that_was_read_is_not_released_again_after_a_crash(
    fresh_server: FreshServer, install: Any
) -> None:
    server = fresh_server(
        settings={"synchronous_commit": "on", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
    )
    install(server.dsn())
    read = "select seq, xid::text, id from pgmb.log_main"
    with server.connect() as connection:
        connection.execute("select pgmb.create_queue('q')")
        sweep_at_once(connection)
        connection.execute(DUE)
    with psycopg.connect(server.dsn(), autocommit=True) as consumer:
        consumer.execute("select from pgmb.receive('q', durable => false)")
        # Another reader, which writes nothing down here.
        before = consumer.execute(read).fetchall()
        assert len(before) == 1
        server.kill()
    server.start_again()
    with server.connect() as connection:
        assert connection.execute("select from pgmb.delayed").fetchall() == []
        assert connection.execute(read).fetchall() == before
