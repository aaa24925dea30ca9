"""The owner of a table has code run in the sessions of others: when they analyze, index or refresh it.

PostgreSQL runs that code as the table's owner, but the session still belongs to the superuser or the owner of
the database. The functions of pgmb must not take the session's role for the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from harness.databases import create_database, drop_database
from harness.server import Server
from pgmb import schema
from tests.conftest import Connect
from tests.contract.cast import Cast

ATTEMPTS = {
    "receive": "select count(*) from pgmb.receive('theirs')",
    "receive any": "select count(*) from pgmb.receive_any('{theirs}')",
    "ack": "select pgmb.ack((select lease from lair.known))",
    "extend": "select count(*) from pgmb.extend((select lease from lair.known))",
    "dead letters": "select count(*) from pgmb.dead_letters('theirs')",
    "pause": "select pgmb.pause('theirs')",
    "read": "select count(*) from pgmb.between('theirs', pgmb.earliest('theirs'), pgmb.position('theirs'))",
    "forget a reader": "select pgmb.forget('theirs', 'reader')",
    "subscribe": "select pgmb.subscribe('g', stream => 'theirs')",
    "write a condition": "select pgmb.subscribe('g', condition => 'true', stream => 'mine')",
    "cancel": "select 1 / pgmb.cancel((select id from lair.known))::int",
    "attach events": "select pgmb.attach_mutations('public.accounts', 'insert', 'mine')",
    "stage": "select pgmb.claim_stage('theirs', 'app')",
    "status": "select count(*) from pgmb.queue_status where queue = 'theirs' having count(*) > 0",
    "create a queue": "select pgmb.create_queue('made')",
    "grant": "select pgmb.grant_consume('theirs', 'lair')",
}

OPERATIONS = [
    "analyze lair.t",
    "vacuum analyze lair.t",
    "reindex table lair.t",
    "create index on lair.t ((lair.f(id) + 1))",
    "refresh materialized view lair.seen",
    "vacuum full lair.t",
]


@pytest.fixture(params=["superuser", "database owner"])
def owner(
    request: pytest.FixtureRequest, server: Server, cast: Cast, connect: Connect
) -> Iterator[psycopg.Connection[Any]]:
    """A session of the role that installed pgmb."""
    name = create_database(server)
    role = None
    if request.param != "superuser":
        role = cast.role("owner")
        server.admin().execute(
            sql.SQL("alter database {} owner to {}").format(sql.Identifier(name), sql.Identifier(role))
        )
        server.admin().execute(sql.SQL("alter role {} createrole").format(sql.Identifier(role)))
    dsn = server.dsn(name, role) if role else server.dsn(name)
    schema.install(dsn)
    connection = connect(dsn)
    yield connection
    connection.close()
    drop_database(server, name)


@pytest.fixture
def mallory(server: Server, owner: psycopg.Connection[Any], cast: Cast, connect: Connect) -> str:
    """A role with a stream and a queue of its own, and a table whose index calls pgmb."""
    role = cast.role("mallory")
    for statement in (
        "select pgmb.create_stream('mine'), pgmb.create_stream('theirs')",
        "select pgmb.create_queue('own', stream => 'mine'), pgmb.create_queue('theirs', stream => 'theirs')",
        "create table public.accounts (id int)",
        "select pgmb.publish('t', '1', stream => 'theirs'), pgmb.publish('t', '2', stream => 'theirs')",
        "select pgmb.confirm('theirs', 'reader', pgmb.earliest('theirs'))",
    ):
        owner.execute(statement)
    for grant in ("grant_publish('mine', %s)", "grant_read('mine', %s)", "grant_consume('own', %s)"):
        owner.execute(f"select pgmb.{grant}", [role])
    owner.execute(sql.SQL("create schema lair"))
    owner.execute(sql.SQL("grant all on schema lair to {}").format(sql.Identifier(role)))
    owner.execute("create table lair.known (lease uuid, id uuid); grant select on lair.known to public")
    owner.execute(
        "insert into lair.known values ((select lease from pgmb.receive('theirs', 1)),"
        " pgmb.publish('t', '3', stream => 'theirs', delay => '1 day'))"
    )
    acting = connect(server.dsn(owner.info.dbname, role))
    acting.execute("create table lair.log (attempt text, said text)")
    acting.execute("create table lair.attempts (name text, statement text)")
    with acting.cursor() as cursor:
        cursor.executemany("insert into lair.attempts values (%s, %s)", list(ATTEMPTS.items()))
    acting.execute(
        """
        create function lair.try() returns void language plpgsql as $$
        declare
          one record;
        begin
          for one in select * from lair.attempts loop
            begin
              execute one.statement;
              insert into lair.log values (one.name, 'worked for ' || session_user);
            exception when others then
              insert into lair.log values (one.name, sqlstate || ' ' || sqlerrm);
            end;
          end loop;
        end $$
        """
    )
    acting.execute(
        "create function lair.f(int) returns int language plpgsql immutable as"
        " $$begin if current_setting('lair.armed', true) = 'on' then perform lair.try(); end if;"
        " return $1; end$$"
    )
    acting.execute("create table lair.t (id int)")
    acting.execute("insert into lair.t values (1)")
    acting.execute("create index on lair.t (lair.f(id))")
    acting.execute("create materialized view lair.seen as select lair.f(id) from lair.t")
    acting.close()
    return role


@pytest.mark.parametrize("operation", OPERATIONS)
def test_code_of_a_table_gets_nothing_by_the_session_it_runs_in(
    server: Server, owner: psycopg.Connection[Any], mallory: str, operation: str
) -> None:
    plain_owner = owner.info.user != server.admin().info.user
    session = owner
    if plain_owner and "analyze" not in operation:
        session = psycopg.connect(server.dsn(owner.info.dbname), autocommit=True)
    session.execute("set lair.armed = 'on'")
    session.execute(operation)
    session.execute("reset lair.armed")
    if session is not owner:
        session.close()
    with psycopg.connect(server.dsn(owner.info.dbname)) as looking:
        said: dict[str, str] = dict(looking.execute("select attempt, said from lair.log").fetchall())
    assert said.keys() == ATTEMPTS.keys()
    assert {name: text for name, text in said.items() if text.startswith("worked")} == {}
    assert owner.execute("select count(*) from pgmb.receive('theirs')").fetchone() == (1,)
    assert owner.execute("select count(*) from pgmb.reader").fetchone() == (1,)
    assert owner.execute("select count(*) from pgmb.delayed").fetchone() == (1,)
    assert owner.execute("select count(*) from pgmb.table_mutations()").fetchone() == (0,)


def test_a_materialized_view_of_pgmb_is_refused_with_a_hint(db: psycopg.Connection[Any]) -> None:
    """Nothing tells whose definition it is. A view, or a table that is filled by the caller, works."""
    db.execute("select pgmb.create_queue('q')")
    with pytest.raises(psycopg.Error, match="cannot tell which role calls") as refusal:
        db.execute("create materialized view depths as select queue, waiting from pgmb.queue_status")
    assert refusal.value.sqlstate == "MB042"
    db.execute("create table depths as select queue, waiting from pgmb.queue_status")
    assert db.execute("select queue from depths").fetchall() == [("q",)]
