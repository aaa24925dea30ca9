"""Upgrading: an upgraded database is the same as a fresh one, what is in flight continues, and packages and
databases of different versions refuse each other.

There is one version until the first release, so the tests make the next one themselves (versions.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import pgmb
from harness.databases import create_database, drop_database
from harness.server import Server
from pgmb import schema
from tests.migration.catalog import catalog
from tests.migration.versions import add_migration, become, next_version

THIS = schema.VERSION
NEXT = schema.VERSION + 1


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """The SQL of the next version."""
    return next_version(tmp_path)


def test_an_upgraded_schema_is_the_same_as_a_fresh_one(
    db: psycopg.Connection[Any], server: Server, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, newer, NEXT)
    schema.upgrade(db)
    assert schema.installed_version(db) == NEXT
    name = create_database(server)
    schema.install(server.dsn(name))
    with server.connect(name) as fresh:
        ours, theirs = catalog(db), catalog(fresh)
        for part, rows in theirs.items():
            assert ours[part] == rows, part
        assert db.execute("select pgmb.extras()").fetchone() == (0,)
    drop_database(server, name)


def test_each_pending_migration_runs_once_in_order_and_in_one_transaction(
    db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (NEXT + 1, NEXT + 2):
        before = f"select {number} from pgmb.installation where version = {number - 1}"
        add_migration(newer, number, f"insert into pgmb.extra (seq) {before};")
    become(monkeypatch, newer, NEXT + 2)
    schema.upgrade(db)
    schema.upgrade(db)
    assert schema.installed_version(db) == NEXT + 2
    rows = db.execute("select seq, xmin::text from pgmb.extra order by id").fetchall()
    assert [seq for seq, _ in rows] == [NEXT + 1, NEXT + 2]
    assert len({xid for _, xid in rows}) == 1


def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_migration(newer, NEXT + 1, "select 1 / 0;")
    db.execute("select pgmb.create_queue('q')")
    before = catalog(db)
    with monkeypatch.context() as patch:
        become(patch, newer, NEXT + 1)
        with pytest.raises(psycopg.errors.DivisionByZero):
            schema.upgrade(db)
    assert catalog(db) == before
    assert schema.installed_version(db) == THIS
    with pgmb.connect(dsn) as broker:
        broker.publish("t", 1)
        assert [event.payload for event in broker.receive("q")] == [1]


def test_an_older_client_refuses_a_newer_schema_and_does_not_touch_it(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        become(patch, newer, NEXT)
        schema.upgrade(db)
    before = catalog(db)
    with pytest.raises(pgmb.SchemaVersionError, match=f"version {NEXT}.*version {THIS}") as caught:
        pgmb.connect(dsn)
    assert caught.value.hint == "Upgrade the pgmb package."
    with pytest.raises(pgmb.SchemaVersionError, match=f"newer than {THIS}"):
        schema.install(db)
    with pytest.raises(psycopg.Error) as refused:
        db.execute(schema.emit().encode())
    assert refused.value.sqlstate == "MB030"
    db.execute("rollback")
    assert catalog(db) == before


def test_a_newer_client_refuses_an_older_schema_until_it_is_upgraded(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, newer, NEXT)
    with pytest.raises(pgmb.SchemaVersionError, match=f"version {THIS}.*version {NEXT}") as caught:
        pgmb.connect(dsn)
    assert "pgmb install" in str(caught.value.hint)
    schema.upgrade(db)
    with pgmb.connect(dsn) as broker:
        broker.publish("t", 1)


def test_what_is_in_flight_survives_the_upgrade(
    db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases, retries waiting and leased, delays, dead letters, positions, ticks and readers."""

    def value(statement: str, *parameters: Any) -> Any:
        ((only,),) = db.execute(statement, parameters).fetchall()
        return only

    db.execute("select pgmb.create_queue('q', '{t}', lease_for => '1 hour')")
    start = value("select pgmb.position()::text")
    for number in range(8):
        db.execute("select pgmb.publish('t', to_json(%s::int), key => 'k', headers => '{}')", [number])
    later = value("select pgmb.publish('t', '100', delay => '1 hour')")
    leases = [
        db.execute("select lease, seq, payload from pgmb.receive('q', 1)").fetchall()[0] for _ in range(6)
    ]
    db.execute("select pgmb.ack(%s)", [leases[0][0]])
    db.execute("select pgmb.retry(%s, after => '1 hour', error => 'later')", [leases[1][0]])
    db.execute("select pgmb.retry(%s, after => '0 s')", [leases[2][0]])
    retried = value("select lease from pgmb.receive('q', 1)")
    db.execute("select pgmb.bury(%s, error => 'broken')", [leases[3][0]])
    tick = value("select pgmb.tick()")
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.publish('t', '8')")

    become(monkeypatch, newer, NEXT)
    schema.upgrade(db)

    assert value("select pgmb.ack(%s)", leases[4][0]) == 1
    assert value("select pgmb.ack(%s)", retried) == 1
    assert value("select pgmb.ack(%s)", leases[0][0]) == 0
    assert value("select pgmb.retry(%s, after => '0 s')", leases[5][0]) == 1
    assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(5, 2)]
    fresh = [db.execute("select payload, attempt from pgmb.receive('q', 2)").fetchall() for _ in range(2)]
    assert fresh == [[(6, 1), (7, 1)], [(8, 1)]]
    assert db.execute("select payload, error from pgmb.dead_letters('q')").fetchall() == [(3, "broken")]
    assert db.execute("select payload, error, attempt from pgmb.retry where lease is null").fetchall() == [
        (1, "later", 2)
    ]
    assert value("select pgmb.cancel(%s)", later) is True
    read = "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position_of('main', %s))"
    assert [row[0] for row in db.execute(read, [start, tick]).fetchall()] == list(range(8))
    assert value("select count(*) from pgmb.reader") == 1
    db.execute("select pgmb.maintain()")


def test_an_upgrade_waits_for_no_open_publisher_and_no_open_reader_of_the_log(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn) as publisher, psycopg.connect(dsn) as reader:
        publisher.execute("select pgmb.publish('t', '1')")
        reader.execute("select count(*) from pgmb.log_main")
        db.execute("set lock_timeout = '5s'")
        become(monkeypatch, newer, NEXT)
        schema.upgrade(db)
        publisher.commit()
        reader.commit()


def test_a_role_that_was_granted_a_stream_or_a_queue_keeps_it(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the upgrade drops functions and creates them again."""
    publisher, worker = (f"{name}_{uuid4().hex[:12]}" for name in ("publisher", "worker"))
    try:
        for role in (publisher, worker):
            db.execute(f"create role {role} login")
        db.execute("select pgmb.create_queue('q')")
        db.execute("select pgmb.create_stream('other')")
        db.execute("select pgmb.grant_publish('main', %s)", [publisher])
        db.execute("select pgmb.grant_consume('q', %s), pgmb.grant_read('main', %s)", [worker, worker])
        become(monkeypatch, newer, NEXT)
        schema.upgrade(db)
        with psycopg.connect(dsn, user=publisher, autocommit=True) as connection:
            connection.execute("select pgmb.publish('t', '1')")
            connection.execute("select pgmb.publish('t', '1', dedup_key => 'k')")
            connection.execute("select pgmb.publish_many('{t}', '{1}'::json[])")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("select pgmb.publish('t', '1', stream => 'other')")
        with psycopg.connect(dsn, user=worker, autocommit=True) as connection:
            assert len(connection.execute("select * from pgmb.receive('q')").fetchall()) == 3
            connection.execute("select pgmb.position()")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("select pgmb.publish('t', '1')")
    finally:
        for role in (publisher, worker):
            db.execute(f"drop owned by {role}")
            db.execute(f"drop role {role}")


@pytest.mark.parametrize(
    "change",
    [
        "drop index pgmb.claim_expiry",
        "alter table pgmb.queue alter max_attempts set default 11",
        "alter function pgmb.ack(uuid, bigint[]) set jit = on",
        "grant select on pgmb.dead to public",
        "alter table pgmb.retry alter error set not null",
        "drop policy publish on pgmb.delayed",
    ],
)
def test_the_comparison_sees_a_difference(dsn: str, change: str) -> None:
    with psycopg.connect(dsn) as connection:
        before = catalog(connection)
        connection.execute(change)
        assert catalog(connection) != before
