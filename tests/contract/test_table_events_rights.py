"""Table events and rights: writers need none, owners gain none, and nobody publishes by way of a table.

A test for each attempt. The schema's owner is the tests' superuser, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from harness.databases import create_database, drop_database
from harness.server import Server
from pgmb import schema
from tests.conftest import Connect
from tests.contract.cast import Cast
from tests.contract.mutations import Mutation, mutations, watch

Acting = Callable[[str], psycopg.Connection[Any]]

DENIED = psycopg.errors.InsufficientPrivilege


@pytest.fixture
def app(db: psycopg.Connection[Any], cast: Cast) -> psycopg.Connection[Any]:
    """A plain role that owns the table app.users."""
    role = cast.role("app")
    db.execute(f"create schema app authorization {role}")
    connection = cast.acting(role)
    connection.execute("create table app.users (id int primary key, name text)")
    return connection


def test_writers_and_owners_of_the_table_need_no_right_here(
    db: psycopg.Connection[Any], cast: Cast, app: psycopg.Connection[Any]
) -> None:
    writer_role = cast.role("writer")
    app.execute(f"grant usage on schema app to {writer_role}; grant all on app.users to {writer_role}")
    watch(db, "app.users")
    writer = cast.acting(writer_role)
    for connection, number in ((app, 1), (writer, 2)):
        connection.execute("insert into app.users values (%s, 'x')", [number])
        connection.execute("insert into app.users select g, 'x' from generate_series(100, 150) g")
        connection.execute("update app.users set name = 'y'")
        connection.execute("delete from app.users where id >= 100")
        with pytest.raises(DENIED):
            connection.execute("select pgmb.publish('t', '1')")
        with pytest.raises(DENIED):
            connection.execute("select * from pgmb.log_main")
        with pytest.raises(DENIED):
            connection.execute("select pgmb.table_mutations()")
    assert len(mutations(db)) == 2 * (1 + 51 + 52 + 51)


def test_an_owner_who_may_publish_watches_a_table_by_himself(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any]
) -> None:
    """The schema's owner is a superuser here, and so may make triggers everywhere."""
    with pytest.raises(DENIED):
        watch(app, "app.users")
    db.execute("select pgmb.create_stream('others')")
    db.execute("select pgmb.grant_publish('main', %s)", [app.info.user])
    watch(app, "app.users", delete=False)
    with pytest.raises(DENIED, match="may not publish to stream others"):
        watch(app, "app.users", stream="others")
    app.execute("insert into app.users values (1)")
    assert mutations(db) == [Mutation("app.users.insert", "1", {"id": 1, "name": None})]
    assert app.execute("select insert, update, delete, stream from pgmb.table_mutations()").fetchall() == [
        (True, True, False, "main")
    ]
    watch(app, "app.users", insert=False)
    app.execute("insert into app.users values (2)")
    assert mutations(db) == []
    assert app.execute("select pgmb.stop_table_mutations('app.users')").fetchone() == (True,)


def test_nobody_watches_the_table_of_another(
    db: psycopg.Connection[Any], cast: Cast, app: psycopg.Connection[Any]
) -> None:
    other_role = cast.role("other", "pgmb_publisher")
    app.execute(f"grant usage on schema app to {other_role}; grant all on app.users to {other_role}")
    other = cast.acting(other_role)
    with pytest.raises(DENIED, match="does not own table"):
        watch(other, "app.users")
    for statement in (
        "select pgmb.attach_mutations('app.users', 'insert', 'main')",
        (
            "create trigger forged after insert on app.users"
            " execute function pgmb_internal.publish_mutations('main')"
        ),
    ):
        with pytest.raises(DENIED):
            other.execute(statement)
    watch(db, "app.users")
    with pytest.raises(DENIED):
        other.execute("select pgmb.stop_table_mutations('app.users')")
    with pytest.raises(DENIED):
        watch(other, "app.users", insert=False)
    assert len(db.execute("select * from pgmb.table_mutations()").fetchall()) == 1


@pytest.mark.parametrize("member_of", [[], ["pgmb_publisher"], ["pgmb_consumer"]])
def test_nobody_but_an_admin_puts_the_trigger_on_a_table_himself(
    db: psycopg.Connection[Any], cast: Cast, member_of: list[str]
) -> None:
    """Not even on his own: its argument says to which stream."""
    role = cast.role("mallory", *member_of)
    db.execute(f"create schema mine authorization {role}")
    mallory = cast.acting(role)
    mallory.execute("create table mine.t (id int)")
    for timing in ("after insert", "before insert", "after truncate"):
        with pytest.raises(DENIED):
            mallory.execute(
                f"create trigger forged {timing} on mine.t for each statement"
                " execute function pgmb_internal.publish_mutations('main')"
            )
    with pytest.raises(DENIED):
        mallory.execute("select pgmb_internal.publish_mutations()")


def test_an_admin_who_is_no_superuser_needs_the_right_to_make_triggers(
    db: psycopg.Connection[Any], cast: Cast, app: psycopg.Connection[Any]
) -> None:
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    app.execute(f"grant usage on schema app to {admin.info.user}")
    with pytest.raises(DENIED):
        watch(admin, "app.users")
    app.execute(f"grant trigger on app.users to {admin.info.user}")
    watch(admin, "app.users")
    app.execute("insert into app.users values (1)")
    assert len(mutations(db)) == 1
    # PostgreSQL lets only its owner drop it.
    with pytest.raises(DENIED):
        admin.execute("select pgmb.stop_table_mutations('app.users')")
    app.execute("drop trigger pgmb_insert on app.users")


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize("size", [1, 50])
def test_a_tables_rows_bring_no_function_that_runs_as_the_owner(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any], size: int, custom: bool
) -> None:
    """row_to_json calls casts to json, which whoever owns a type can make, at any time."""
    app.execute(
        "create table app.loot (who name);"
        "create type app.trap as enum ('x');"
        "create type app.span as range (subtype = int);"
        "create domain app.trapped as app.trap;"
        "create type app.holder as (a int, b app.trapped[]);"
        "create table app.other (a int, b app.trap);"
        "create table app.traps (id app.trap, n int primary key, list app.trap[], domain app.trapped,"
        " held app.holder, helds app.holder[], span app.span, other app.other)"
    )
    for kind in ("trap", "span"):
        app.execute(
            f"create function app.spring(app.{kind}) returns json language plpgsql as $$ begin"
            " insert into app.loot values (current_user); return '1'; end $$;"
            f"create cast (app.{kind} as json) with function app.spring(app.{kind})"
        )
    if custom:
        db.execute(
            "create or replace function pgmb.serialise_record_for_event(tabl oid, op text, record record,"
            " serialised out jsonb, emit out boolean) language plpgsql as $$ begin"
            " serialised := to_jsonb(record); emit := true; end $$"
        )
    watch(db, "app.traps")
    app.execute(
        "insert into app.traps select 'x', n, '{x}', 'x', '(1,{x})', array['(2,)'::app.holder],"
        f" '[1,2]', '(3,x)' from generate_series(1, {size}) n"
    )
    app.execute("update app.traps set n = -n, id = null, held = row(null, null)")
    app.execute("delete from app.traps")
    found = mutations(db)
    assert len(found) == 3 * size
    assert found[0].row == {
        "id": "x",
        "n": 1,
        "list": "{x}",
        "domain": "x",
        "held": "(1,{x})",
        "helds": '{"(2,)"}',
        "span": "[1,2]",
        "other": "(3,x)",
    }
    assert found[-1].row["id"] is None
    assert found[-1].row["held"] == "(,)"
    assert db.execute("select * from app.loot").fetchall() == []


def test_types_that_are_trusted_read_as_json(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any]
) -> None:
    """A composite type of built-in fields is harmless, whoever owns it, and so is a cast by pgmb's owner."""
    app.execute("create type app.plain as (a int, b text)")
    db.execute(
        "create type ours as enum ('x');"
        "create function spring(ours) returns json language sql as $$ select '{\"our\": 1}'::json $$;"
        "create cast (ours as json) with function spring(ours); grant usage on schema public to public"
    )
    app.execute("create table app.t (id int, plain app.plain, plains app.plain[], ours ours)")
    watch(db, "app.t")
    app.execute("insert into app.t values (1, row(1, 'x'), array[row(2, null)::app.plain], 'x')")
    plain, plains = {"a": 1, "b": "x"}, [{"a": 2, "b": None}]
    assert mutations(db)[0].row == {"id": 1, "plain": plain, "plains": plains, "ours": {"our": 1}}


@pytest.mark.parametrize(
    "op",
    [
        "insert or update",
        "insert on app.users execute function pgmb_internal.refuse_full(); create role mallory superuser; --",
        "INSERT",
        "",
    ],
)
def test_nobody_smuggles_a_statement_in(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any], op: str
) -> None:
    db.execute("select pgmb.grant_publish('main', %s)", [app.info.user])
    with pytest.raises(psycopg.DatabaseError) as caught:
        app.execute("select pgmb.attach_mutations('app.users', %s, 'main')", [op])
    assert caught.value.sqlstate == "MB005"
    with pytest.raises(psycopg.DatabaseError):
        app.execute("select pgmb.attach_mutations('app.users', null, 'main')")
    with pytest.raises(psycopg.DatabaseError):
        app.execute(
            "select pgmb.attach_mutations('app.users', 'insert', 'main''); drop table app.users; --')"
        )


def test_casts_to_text_and_operators_of_others_are_not_called(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any]
) -> None:
    app.execute(
        "create table app.loot (who name);"
        "create type app.trap as enum ('x', 'y');"
        "create function app.spring(app.trap) returns text language plpgsql as $$ begin"
        " insert into app.loot values (current_user); return '1'; end $$;"
        "create function app.spring(app.trap, app.trap) returns boolean language plpgsql as $$ begin"
        " insert into app.loot values (current_user); return true; end $$;"
        "create cast (app.trap as text) with function app.spring(app.trap) as implicit;"
        "create operator app.= (function = app.spring, leftarg = app.trap, rightarg = app.trap);"
        "create operator app.<> (function = app.spring, leftarg = app.trap, rightarg = app.trap);"
        "create table app.t (id app.trap primary key, n int, j app.trap)"
    )
    watch(db, "app.t")
    app.execute("set search_path = app, pg_temp, pg_catalog")
    app.execute(
        "create function app.row_to_json(anyelement) returns json language sql as $$ select '6'::json $$"
    )
    app.execute("create temp table old_rows (id int); create temp table new_rows (id int)")
    app.execute("insert into t values ('x', 1, 'x')")
    app.execute("update t set n = 2, id = 'y', j = 'y'")
    app.execute("delete from t")
    found = mutations(db)
    assert [m.key for m in found] == ["x", "y", "y"]
    assert found[1].changed == {"id": "y", "n": 2, "j": "y"}
    assert db.execute("select * from app.loot").fetchall() == []


def test_row_security_of_the_table_hides_nothing(
    db: psycopg.Connection[Any], app: psycopg.Connection[Any]
) -> None:
    watch(db, "app.users")
    app.execute("alter table app.users enable row level security, force row level security")
    app.execute("create policy own on app.users for all using (name = 'seen') with check (true)")
    app.execute("insert into app.users values (1, 'seen'), (2, 'unseen')")
    assert app.execute("select id from app.users").fetchall() == [(1,)]
    assert [m.row["id"] for m in mutations(db)] == [1, 2]


@pytest.fixture
def plain(server: Server) -> Iterator[tuple[str, str]]:
    """A database where pgmb belongs to a plain role: its name, and that role."""
    owner = f"broker_{uuid4().hex}"
    server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(owner)))
    name = create_database(server)
    server.admin().execute(
        sql.SQL("alter database {} owner to {}").format(sql.Identifier(name), sql.Identifier(owner))
    )
    schema.install(server.dsn(name, owner))
    yield name, owner
    drop_database(server, name)
    server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(owner)))


def test_where_the_schema_belongs_to_a_plain_role(
    plain: tuple[str, str], server: Server, connect: Connect
) -> None:
    database, owner = plain
    root, broker = connect(server.dsn(database)), connect(server.dsn(database, owner))
    cast = Cast(server, database, connect)
    app = cast.acting(cast.role("app"))
    try:
        root.execute(f"create schema app authorization {app.info.user}")
        app.execute("create type app.mood as enum ('well')")
        app.execute("create table app.users (id int primary key, mood app.mood)")
        # The owner of the schema has no right on the table; the owner of the table none here.
        with pytest.raises(DENIED):
            watch(broker, "app.users")
        watch(root, "app.users")
        app.execute("insert into app.users values (1, 'well')")
        app.execute("insert into app.users select g, 'well' from generate_series(2, 50) g")
        app.execute("update app.users set id = -id")
        assert len(mutations(broker)) == 100
        root.execute("select pgmb.stop_table_mutations('app.users')")
        # By himself, with the right to publish, and after letting the schema's owner make triggers.
        broker.execute("select pgmb.grant_publish('main', %s)", [app.info.user])
        with pytest.raises(DENIED) as caught:
            watch(app, "app.users")
        hint = caught.value.diag.message_hint or ""
        usage, trigger, *_ = hint.split("; ")
        assert trigger == f"grant trigger on table app.users to {owner}"
        app.execute(f"{usage}; {trigger}")
        watch(app, "app.users")
        app.execute(f"revoke trigger on app.users from {owner}; revoke usage on schema app from {owner}")
        app.execute("delete from app.users where id = -1")
        assert mutations(broker) == [Mutation("app.users.delete", "-1", {"id": -1, "mood": "well"})]
        app.execute("select pgmb.stop_table_mutations('app.users')")
    finally:
        root.execute(f"drop owned by {app.info.user} cascade")
        server.admin().execute(f"drop role {app.info.user}")
