"""The owner of a table has code run in the sessions of others: when they analyze, index or refresh it.

PostgreSQL runs that code as the table's owner, but the session still belongs to the superuser or the owner of
the database. The functions of pgmb must not take the session's role for the caller's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg
import pytest

from harness.server import Server
from harness.states import paused_queues
from tests.adversary.target import Target

ATTEMPTS = {
    "receive": "select count(*) from pgmb.receive('yours')",
    "receive any": "select count(*) from pgmb.receive_any('{yours}')",
    "ack": "select pgmb.ack((select lease from lair.known))",
    "extend": "select count(*) from pgmb.extend((select lease from lair.known))",
    "dead letters": "select count(*) from pgmb.dead_letters('yours')",
    "pause": "select pgmb.pause('yours')",
    "read": "select count(*) from pgmb.between('other', pgmb.earliest('other'), pgmb.position('other'))",
    "forget a reader": "select pgmb.forget('other', 'reader')",
    "subscribe": "select pgmb.subscribe('g', stream => 'other')",
    "write a condition": "select pgmb.subscribe('g', condition => 'true', stream => 'main')",
    "cancel": "select 1 / pgmb.cancel((select id from lair.known))::int",
    "attach events": "select pgmb.attach_mutations('public.held', 'insert', 'main')",
    "target": "select pgmb.claim_stage('other', 'app')",
    "status": "select count(*) from pgmb.queue_status where queue = 'yours' having count(*) > 0",
    "create a queue": "select pgmb.create_queue('made')",
    "grant": "select pgmb.grant_consume('yours', 'pgmb_consumer')",
}
OPERATIONS = [
    "analyze lair.t",
    "vacuum analyze lair.t",
    "reindex table lair.t",
    "create index on lair.t ((lair.f(id) + 1))",
    "refresh materialized view lair.seen",
    "vacuum full lair.t",
]
LAIR = [
    "create table lair.log (attempt text, said text)",
    "create table lair.attempts (name text, statement text)",
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
    """,
    """
    create function lair.f(int) returns int language plpgsql immutable as $$
    begin
      if current_setting('lair.armed', true) = 'on' then perform lair.try(); end if;
      return $1;
    end $$
    """,
    "create table lair.t (id int)",
    "insert into lair.t values (1)",
    "create index on lair.t (lair.f(id))",
    "create materialized view lair.seen as select lair.f(id) from lair.t",
]

Said: TypeAlias = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def said(target: Target, server: Server) -> Said:
    """What became of each attempt, by operation and attempt."""
    for statement in (
        "select pgmb.confirm('other', 'reader', pgmb.earliest('other'))",
        "create schema lair",
        "create table lair.known (lease uuid, id uuid)",
        "grant select on lair.known to public",
        "insert into lair.known select lease, (select id from pgmb.delayed) from held",
    ):
        target.db.execute(statement.encode())
    mallory = target.role(
        "mallory",
        "grant all on schema lair to {}",
        "select pgmb.grant_publish('main', '{}'), pgmb.grant_read('main', '{}')",
        "select pgmb.grant_consume('mine', '{}')",
    )
    for statement in LAIR:
        mallory.execute(statement.encode())
    with mallory.cursor() as cursor:
        cursor.executemany("insert into lair.attempts values (%s, %s)", list(ATTEMPTS.items()))
    return {operation: became(target, server, mallory, operation) for operation in OPERATIONS}


def became(
    target: Target, server: Server, mallory: psycopg.Connection[Any], operation: str
) -> dict[str, str]:
    mallory.execute("truncate lair.log")
    # The owner of a database may analyze its tables; the rest is for the table's owner and superusers.
    user = target.db.info.user if "analyze" in operation else None
    with psycopg.connect(server.dsn(target.database, user), autocommit=True) as session:
        session.execute("set lair.armed = 'on'")
        session.execute(operation.encode())
    return dict(mallory.execute("select attempt, said from lair.log").fetchall())


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_code_of_a_table_gets_nothing_by_the_session_it_runs_in(
    said: Said, operation: str, attempt: str
) -> None:
    assert said[operation][attempt].startswith(("MB", "42501")), said[operation][attempt]


def test_nothing_was_changed(target: Target, said: Said) -> None:
    assert said.keys() == set(OPERATIONS)
    assert target.db.execute("select count(*) from pgmb.reader").fetchone() == (1,)
    assert target.db.execute("select count(*) from pgmb.delayed").fetchone() == (1,)
    assert target.db.execute("select count(*) from pgmb.table_mutations()").fetchone() == (0,)
    assert paused_queues(target.db) == {}
