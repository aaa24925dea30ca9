"""Upgrading: a database upgraded from any released version is the same as one freshly installed, and what
was in flight goes on.

fixtures/v<N>.sql is the script that version N of the schema was released with, frozen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pgmb import schema
from tests.migration.catalog import catalog

FIXTURES = sorted(
    (Path(__file__).parent / "fixtures").glob("v*.sql"), key=lambda path: int(path.stem.removeprefix("v"))
)
EVERY = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)


def run(connection: psycopg.Connection[Any], fixture: Path) -> None:
    connection.execute(fixture.read_text())


def test_every_released_version_has_its_script() -> None:
    versions = [int(path.stem.removeprefix("v")) for path in FIXTURES]
    assert versions, "at least the first version's script is kept"
    assert versions[0] == 1
    assert versions == list(range(1, versions[-1] + 1))
    assert versions[-1] <= schema.VERSION
    for path, version in zip(FIXTURES, versions, strict=True):
        assert re.search(rf"schema version {version}\b", path.read_text()[:200])


@EVERY
def test_an_upgraded_schema_is_the_same_as_a_fresh_one(empty_dsn: str, dsn: str, fixture: Path) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as upgraded, psycopg.connect(dsn) as fresh:
        run(upgraded, fixture)
        schema.upgrade(upgraded)
        assert schema.installed_version(upgraded) == schema.VERSION
        ours, theirs = catalog(upgraded), catalog(fresh)
        for part, rows in theirs.items():
            assert ours[part] == rows, part


@EVERY
def test_the_released_script_refuses_nothing_it_installed_itself(empty_dsn: str, fixture: Path) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        run(connection, fixture)
        before = catalog(connection)
        run(connection, fixture)
        assert catalog(connection) == before


@EVERY
def test_what_is_in_flight_survives_the_upgrade(empty_dsn: str, fixture: Path) -> None:
    """Leases, retries waiting and leased, delays, dead letters, positions, ticks and readers."""
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        run(db, fixture)

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

        schema.upgrade(db)

        assert value("select pgmb.ack(%s)", leases[4][0]) == 1
        assert value("select pgmb.ack(%s)", retried) == 1
        assert value("select pgmb.ack(%s)", leases[0][0]) == 0
        assert value("select pgmb.retry(%s, after => '0 s')", leases[5][0]) == 1
        assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(5, 2)]
        fresh = [db.execute("select payload, attempt from pgmb.receive('q', 2)").fetchall() for _ in range(2)]
        assert fresh == [[(6, 1), (7, 1)], [(8, 1)]]
        assert db.execute("select payload, error from pgmb.dead_letters('q')").fetchall() == [(3, "broken")]
        assert db.execute(
            "select payload, error, attempt from pgmb.retry where lease is null"
        ).fetchall() == [(1, "later", 2)]
        assert value("select pgmb.cancel(%s)", later) is True
        read = "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position_of('main', %s))"
        assert [row[0] for row in db.execute(read, [start, tick]).fetchall()] == list(range(8))
        assert value("select count(*) from pgmb.reader") == 1
        db.execute("select pgmb.maintain()")


@EVERY
def test_an_upgrade_goes_through_while_consumers_are_busy(empty_dsn: str, fixture: Path) -> None:
    """An open publisher and an open reader of the log do not stop it; it only waits for short ones."""
    with (
        psycopg.connect(empty_dsn, autocommit=True) as db,
        psycopg.connect(empty_dsn) as publisher,
        psycopg.connect(empty_dsn) as reader,
    ):
        run(db, fixture)
        publisher.execute("select pgmb.publish('t', '1')")
        reader.execute("select count(*) from pgmb.log_main")
        db.execute("set lock_timeout = '5s'")
        if "alter table pgmb.log_" not in schema.emit():
            schema.upgrade(db)
        publisher.commit()
        reader.commit()


@EVERY
def test_who_was_granted_a_stream_or_a_queue_keeps_it(empty_dsn: str, fixture: Path) -> None:
    """Although functions are made anew."""
    publisher, worker = (f"{name}_{uuid4().hex[:12]}" for name in ("publisher", "worker"))
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        run(db, fixture)
        try:
            for role in (publisher, worker):
                db.execute(f"create role {role} login")
            db.execute("select pgmb.create_queue('q')")
            db.execute("select pgmb.create_stream('other')")
            db.execute("select pgmb.grant_publish('main', %s)", [publisher])
            db.execute("select pgmb.grant_consume('q', %s), pgmb.grant_read('main', %s)", [worker, worker])
            schema.upgrade(db)
            with psycopg.connect(empty_dsn, user=publisher, autocommit=True) as connection:
                connection.execute("select pgmb.publish('t', '1')")
                connection.execute("select pgmb.publish('t', '1', dedup_key => 'k')")
                connection.execute("select pgmb.publish_many('{t}', '{1}'::json[])")
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute("select pgmb.publish('t', '1', stream => 'other')")
            with psycopg.connect(empty_dsn, user=worker, autocommit=True) as connection:
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
        "alter function pgmb.ack(uuid, bigint[]) set jit = off",
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
