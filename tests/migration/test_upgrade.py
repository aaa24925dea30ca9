"""Upgrading: an upgraded database is the same as a fresh one, what is in flight continues, packages work with
the schema before and after their own, and refuse others.

There is one version until the first release, so the tests make the next one themselves (versions.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import pgmb
from harness.databases import create_database, drop_database
from harness.next_version import add_migration, next_version
from harness.server import Server
from pgmb import schema
from pgmb.server import create_app
from tests.migration.catalog import catalog
from tests.migration.versions import become
from tests.server.asking import asking

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


def test_an_older_package_works_with_the_next_schema_and_does_not_install_over_it(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a rolling upgrade, and the way back: the package may be put back, the schema stays."""
    with monkeypatch.context() as patch:
        become(patch, newer, NEXT)
        schema.upgrade(db)
    before = catalog(db)
    uses_everything(dsn)
    with pytest.raises(pgmb.SchemaVersionError, match=f"newer than {THIS}"):
        schema.install(db)
    with pytest.raises(psycopg.Error) as refused:
        db.execute(schema.emit().encode())
    assert refused.value.sqlstate == "MB030"
    db.execute("rollback")
    assert catalog(db) == before


def test_the_next_package_works_with_this_schema_until_it_is_upgraded(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, newer, NEXT)
    uses_everything(dsn)
    schema.upgrade(db)
    uses_everything(dsn)


@pytest.mark.parametrize(
    ("package", "installed", "fix"),
    [(THIS, THIS + 2, "Upgrade the pgmb package."), (THIS + 2, THIS, "pgmb install")],
)
def test_two_versions_apart_is_refused_with_both_numbers_and_the_fix(
    dsn: str,
    db: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    package: int,
    installed: int,
    fix: str,
) -> None:
    monkeypatch.setattr(schema, "VERSION", package)
    db.execute("update pgmb.installation set version = %s", [installed])
    with pytest.raises(pgmb.SchemaVersionError, match=f"version {installed}.*version {package}") as caught:
        pgmb.connect(dsn)
    assert fix in str(caught.value.hint)


def test_clients_at_work_go_on_through_an_upgrade(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared statements and all: the functions that they call are dropped and made again."""
    with pgmb.connect(dsn) as broker:
        for _ in range(8):
            uses_queue(broker)
        become(monkeypatch, newer, NEXT)
        schema.upgrade(db)
        for _ in range(8):
            uses_queue(broker)


def uses_everything(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        uses_queue(broker)
        start = broker.position()
        broker.publish_many("t", [2, 3])
        assert [event.payload for event in broker.between("main", start, broker.position())] == [2, 3]
        broker.tick()
        broker.maintain()
        assert broker.queue_status()
    asyncio.run(_serves(dsn))


def uses_queue(broker: pgmb.Broker) -> None:
    name = f"q{uuid4().hex[:8]}"
    broker.create_queue(name)
    broker.publish("t", 1)
    lease = broker.receive(name)
    assert [event.payload for event in lease] == [1]
    lease.ack()


async def _serves(dsn: str) -> None:
    async with asking(create_app(dsn)) as client:
        assert (await client.get("/readyz")).status_code == 200


def test_an_upgrade_that_needs_a_lock_stops_no_consumer_and_goes_on_when_it_can(
    dsn: str, db: psycopg.Connection[Any], newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer's open transaction is in its way: the others must not queue up behind it."""
    add_migration(newer, NEXT + 1, "alter table pgmb.claim add column note text;")
    db.execute("select pgmb.create_queue('busy'), pgmb.create_queue('q')")
    db.execute("select pgmb.publish('t', '1')")
    become(monkeypatch, newer, NEXT + 1)
    monkeypatch.setattr(schema, "_RETRY_SECONDS", 0.05)
    attempts: list[float] = []
    sleep = time.sleep

    def retry(seconds: float) -> None:
        attempts.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", retry)
    with psycopg.connect(dsn) as consumer, psycopg.connect(dsn, autocommit=True) as other:
        consumer.execute("select * from pgmb.receive('busy')")
        upgrading = threading.Thread(target=schema.upgrade, args=[dsn])
        upgrading.start()
        received = 0
        while len(attempts) < 2:
            # Longer than any one attempt waits, and a fraction of what it would be behind the transaction.
            other.execute("set statement_timeout = '20s'")
            other.execute("select pgmb.publish('t', '2')")
            received += len(other.execute("select * from pgmb.receive('q')").fetchall())
            assert upgrading.is_alive()
        consumer.commit()
        upgrading.join(60)
    assert received > 0
    assert schema.installed_version(db) == NEXT + 1


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
