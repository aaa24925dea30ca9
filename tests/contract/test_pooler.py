"""Promise 15: every statement works through a transaction pooler.

Debian's pgbouncer in transaction mode, two server sessions for many clients, so that hardly two
transactions of a client run in the same session.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.pgbouncer import PgBouncer
from harness.server import Server
from pgmb.erasure import Eraser
from pgmb.errors import WrongServer

CLIENTS = 6
EVENTS = 60


@pytest.fixture
def pooled(server: Server, db: psycopg.Connection[Any]) -> Iterator[str]:
    """A connection string to the test's database through pgbouncer."""
    with PgBouncer.start(server, settings={"default_pool_size": 2}) as bouncer:
        yield bouncer.dsn(db.info.dbname)


def client(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, prepare_threshold=None)


def work(dsn: str, first: int, seen: list[int], lock: threading.Lock) -> None:
    """Publishes by every way there is, and settles in every way there is until all came."""
    with client(dsn) as connection:
        numbers = iter(range(first, first + EVENTS))
        for number in numbers:
            kind = number % 3
            if kind == 0:
                connection.execute("select pgmb.publish('t', to_json(%s::int))", [number])
            elif kind == 1:
                connection.execute("select pgmb.publish_many('t', array[to_json(%s::int)])", [number])
            else:
                with (
                    connection.transaction(),
                    connection.cursor().copy("copy pgmb.log_main (topic, payload) from stdin") as copy,
                ):
                    copy.write_row(("t", str(number)))
            rows = connection.execute(
                "select lease, seq, payload, attempt from pgmb.receive('q', 5)"
            ).fetchall()
            settle(connection, rows, seen, lock)
        idle = 0
        while idle < 3:
            rows = connection.execute(
                "select lease, seq, payload, attempt from pgmb.receive('q', 5)"
            ).fetchall()
            idle = 0 if rows else idle + 1
            settle(connection, rows, seen, lock)


def settle(
    connection: psycopg.Connection[Any], rows: list[Any], seen: list[int], lock: threading.Lock
) -> None:
    if not rows:
        return
    lease = rows[0][0]
    connection.execute("select pgmb.extend(%s, '1 minute')", [lease])
    first_time = [seq for _, seq, payload, attempt in rows if attempt == 1 and payload % 10 == 0]
    if first_time:
        connection.execute("select pgmb.retry(%s, %s, '0 s')", [lease, first_time])
    done = [(seq, payload) for _, seq, payload, attempt in rows if seq not in first_time]
    if done:
        with connection.transaction():
            assert connection.execute(
                "select pgmb.ack(%s, %s)", [lease, [seq for seq, _ in done]]
            ).fetchone() == (len(done),)
            connection.execute("select pgmb.tick()")
        with lock:
            seen += [payload for _, payload in done]


def test_everything_works_through_a_transaction_pooler(pooled: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', lease_for => '1 minute')")
    seen: list[int] = []
    failures: list[BaseException] = []
    lock = threading.Lock()

    def run(first: int) -> None:
        try:
            work(pooled, first, seen, lock)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number * EVENTS,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(seen) == list(range(CLIENTS * EVENTS)), "each once, none lost"
    leaked = db.execute(
        "select locktype, mode, granted from pg_locks where locktype = 'advisory' and database ="
        " (select oid from pg_database where datname = current_database())"
    ).fetchall()
    assert leaked == []


def test_maintenance_and_administration_work_through_a_pooler(
    pooled: str, db: psycopg.Connection[Any]
) -> None:
    with client(pooled) as one, client(pooled) as two:
        one.execute("select pgmb.create_stream('s', keep_for => '0 s', rotate_every => '0 s')")
        two.execute("select pgmb.create_queue('q', stream => 's')")
        for _ in range(3):
            one.execute("select pgmb.publish('t', '1', stream => 's')")
            two.execute("select pgmb.maintain()")
            one.execute("select pgmb.maintain()")
            got = two.execute("select lease from pgmb.receive('q')").fetchall()
            assert one.execute("select pgmb.ack(%s)", got[0]).fetchone() == (1,)
        two.execute("select pgmb.seek('q', pgmb.position('s'))")
        one.execute("select pgmb.pause('q')")
        two.execute("select pgmb.resume('q')")
        one.execute("select pgmb.drop_queue('q')")
        two.execute("select pgmb.drop_stream('s')")
    assert db.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)


def test_a_cluster_check_remembered_by_a_session_does_not_pass_to_another_database(
    pooled: str, db: psycopg.Connection[Any]
) -> None:
    with client(pooled) as connection:
        connection.execute("select pgmb.position()")
        settings = connection.execute(
            "select count(*) from pg_settings where name like 'pgmb.%' and source = 'session'"
        ).fetchone()
        assert settings is not None
        connection.execute("discard all")
        connection.execute("select pgmb.position()")


def test_settings_of_receive_do_not_leak_into_the_shared_session(pooled: str) -> None:
    """durable => false is for its own transaction; planner settings for the function alone."""
    names = (
        "synchronous_commit",
        "enable_seqscan",
        "enable_bitmapscan",
        "jit",
        "lock_timeout",
        "search_path",
    )
    show = "select " + ", ".join(f"current_setting('{name}')" for name in names)
    with client(pooled) as connection:
        before = connection.execute(show).fetchone()
        connection.execute("select pgmb.create_queue('q')")
        connection.execute("select pgmb.publish('t', '1')")
        connection.execute("select pgmb.receive('q', durable => false)")
        for _ in range(5):
            assert connection.execute(show).fetchone() == before


def test_an_erasure_refuses_a_pooler_where_its_lock_would_stay(
    pooled: str, db: psycopg.Connection[Any]
) -> None:
    with pytest.raises(WrongServer, match="pooler"):
        Eraser(pooled, ["somebody"]).erase("request 17")
    assert db.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)
    assert db.execute("select count(*) from pgmb.erasure").fetchone() == (0,)
