"""Conditions wherever pgmb is installed: by plain owners, twice, beside another database, from a dump."""

from __future__ import annotations

import subprocess
from typing import Any

import psycopg
import pytest

from harness.databases import create_database, drop_database
from harness.installations import binaries
from harness.server import Server
from harness.states import paused_queues
from pgmb import schema
from tests.conftest import FreshServer

CONDITION = "s.params @> jsonb_build_object('n', e.payload->'n')"


def ask(conn: psycopg.Connection[Any]) -> None:
    conn.execute("set statement_timeout = '60s'")
    conn.execute("select pgmb.create_queue('q', condition => %s, params => '{\"n\": 1}')", [CONDITION])
    conn.execute("select pgmb.create_queue('g')")
    conn.execute("select pgmb.subscribe('g', condition => %s, params => '{\"n\": 1}')", [CONDITION])


def works(conn: psycopg.Connection[Any]) -> None:
    conn.execute("set statement_timeout = '60s'")
    for n in (1, 2):
        conn.execute("select pgmb.publish('t', json_build_object('n', %s::int))", [n])
    for call in ("receive('q')", "receive_group('g')"):
        rows = conn.execute(f"select payload->>'n', lease from pgmb.{call}").fetchall()
        assert [row[0] for row in rows] == ["1"], (
            call,
            paused_queues(conn),
        )
        conn.execute("select pgmb.ack(%s)", [rows[0][1]])


@pytest.mark.parametrize("createrole", [True, False])
def test_a_plain_owner_has_them_if_it_may_make_roles(fresh_server: FreshServer, createrole: bool) -> None:
    server = fresh_server()
    server.admin().execute(f"create role owner login {'createrole' if createrole else 'nocreaterole'}")
    server.admin().execute("create database mine owner owner")
    for _ in range(2):
        schema.install(server.dsn("mine", "owner"))
    with psycopg.connect(server.dsn("mine", "owner"), autocommit=True) as conn:
        if createrole:
            ask(conn)
            works(conn)
            schema.upgrade(conn)
            works(conn)
            return
        with pytest.raises(psycopg.Error) as refusal:
            ask(conn)
        assert refusal.value.sqlstate == "MB025"
        assert "pgmb_matcher" in (refusal.value.diag.message_hint or "")
        conn.execute("select pgmb.create_queue('f', filter => '$.payload.n == 1')")
        conn.execute("select pgmb.publish('t', '{\"n\": 1}')")
        assert len(conn.execute("select * from pgmb.receive('f')").fetchall()) == 1
        conn.execute("select pgmb.maintain()")
        # What the hint says is what it takes.
        server.admin().execute(
            "create role pgmb_matcher nologin; create role pgmb_parser nologin;"
            " grant pgmb_matcher, pgmb_parser to owner"
        )
        server.admin().execute("create role pgmb_conditions nologin")
        schema.upgrade(conn)
        ask(conn)
        works(conn)
        schema.uninstall(conn)
        left = conn.execute("select nspname from pg_namespace where nspname like 'pgmb%'").fetchall()
        assert left == []


def test_two_databases_have_their_own(fresh_server: FreshServer) -> None:
    server = fresh_server()
    server.admin().execute("create role one login createrole; create role two login createrole")
    for name in ("one", "two"):
        server.admin().execute(f"create database {name} owner {name}")
    server.admin().execute("create database three")
    schema.install(server.dsn("three"))
    schema.install(server.dsn("one", "one"))
    schema.install(server.dsn("two", "two"))
    with psycopg.connect(server.dsn("three"), autocommit=True) as conn:
        ask(conn)
        works(conn)
    for name in ("one", "two"):
        with psycopg.connect(server.dsn(name, name), autocommit=True) as conn:
            conn.execute("select pgmb.create_queue('plain')")
            if conn.execute("select pgmb_internal.conditions_available()").fetchone() == (True,):
                ask(conn)
                works(conn)


def test_upgrading_again_changes_nothing(db: psycopg.Connection[Any]) -> None:
    ask(db)
    functions = (
        "select p.proname, p.prosrc, p.proowner, p.proacl::text, p.proconfig from pg_proc p"
        " where p.pronamespace = 'pgmb_condition'::regnamespace order by 1"
    )
    before = db.execute(functions).fetchall()
    for _ in range(2):
        schema.upgrade(db)
        assert db.execute(functions).fetchall() == before
    works(db)
    schema.uninstall(db)
    assert db.execute("select nspname from pg_namespace where nspname like 'pgmb%'").fetchall() == []


@pytest.mark.once(15)
@pytest.mark.parametrize("options", [[], ["--no-owner"], ["--no-owner", "--no-acl"]], ids=" ".join)
def test_dump_and_restore_keep_them(
    db: psycopg.Connection[Any], server: Server, pg_major: int, options: list[str]
) -> None:
    pg_dump = binaries(pg_major) / "pg_dump"
    if not pg_dump.exists():
        pytest.skip("the build of this version has no pg_dump")
    ask(db)
    name = create_database(server)
    try:
        dump = subprocess.run(
            [pg_dump, *options, "-d", server.dsn(db.info.dbname)], capture_output=True, check=True, text=True
        )
        subprocess.run(
            [binaries(pg_major) / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn(name)],
            input=dump.stdout,
            text=True,
            capture_output=True,
            check=True,
        )
        with psycopg.connect(server.dsn(name), autocommit=True) as restored:
            if options:
                # Whoever restored it owns what runs conditions now: they do not run as that.
                restored.execute("set statement_timeout = '60s'")
                restored.execute("select pgmb.publish('t', '{\"n\": 1}')")
                assert restored.execute("select * from pgmb.receive('q')").fetchall() == []
                reason = str(paused_queues(restored)["q"])
                assert "pgmb upgrade" in reason or "not as it was made" in reason
                schema.upgrade(restored)
                restored.execute("select pgmb.purge('q'), pgmb.purge('g'), pgmb.resume('q')")
                restored.execute("select pgmb.resume_subscriptions('g')")
            works(restored)
    finally:
        drop_database(server, name)
