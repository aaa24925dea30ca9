"""What an admin who is not the owner, and the owner of a table with events, try by way of triggers."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.contract.cast import Cast
from tests.contract.mutations import mutations, watch
from tests.contract.secret import SECRET, hide
from tests.contract.test_privileges import refused, rows


@pytest.fixture
def mallory(db: psycopg.Connection[Any], cast: Cast) -> psycopg.Connection[Any]:
    """An admin with a table of its own, whose session answers to the names of the transition tables."""
    hide(db)
    role = cast.role("mallory", "pgmb_admin")
    db.execute(sql.SQL("create schema lair authorization {}").format(sql.Identifier(role)))
    acting = cast.acting(role)
    acting.execute("create table lair.t (id int primary key)")
    acting.execute("grant all on lair.t to public; grant usage on schema lair to public")
    acting.execute(
        "create function lair.take() returns int language plpgsql as $$begin"
        " update public.secret set text = current_user; return 1; end$$"
    )
    for name in ("new_rows", "old_rows"):
        acting.execute(f"create temporary view {name} as select lair.take() as id")
    return acting


HOOKS = [
    "after insert on lair.t for each statement",
    "before insert on lair.t for each statement",
    "after insert on lair.t for each row",
    "after insert on lair.t referencing new table as other for each statement",
    "after insert or update on lair.t for each statement",
    "after update on lair.t for each statement",
    "after delete on lair.t for each statement",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_admin_cannot_hook_the_trigger_function_to_a_table(
    db: psycopg.Connection[Any], mallory: psycopg.Connection[Any], hook: str
) -> None:
    refused(mallory, f"create trigger hook {hook} execute function pgmb_internal.publish_mutations('main')")
    # Were it allowed to, the function would look at how it was hooked first.
    db.execute(f"create trigger hook {hook} execute function pgmb_internal.publish_mutations('main')")
    with mallory.transaction(force_rollback=True), pytest.raises(psycopg.Error) as refusal:
        mallory.execute("insert into lair.t values (1); update lair.t set id = 2; delete from lair.t")
    assert refusal.value.sqlstate == "42501"
    assert "was not made by" in str(refusal.value)
    assert rows(db, "select text from public.secret") == [(SECRET,)]


def test_no_trigger_function_is_executable(installed_roles: list[str], db: psycopg.Connection[Any]) -> None:
    for role in installed_roles:
        assert (
            rows(
                db,
                "select p.oid::regprocedure::text from pg_proc p where p.prorettype = 'trigger'::regtype"
                " and p.pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[])"
                " and has_function_privilege(%s, p.oid, 'execute')",
                role,
            )
            == []
        )


@pytest.fixture
def installed_roles(db: psycopg.Connection[Any]) -> list[str]:
    return [name for (name,) in rows(db, "select rolname::text from pg_roles where rolname like 'pgmb\\_%%'")]


def test_the_names_of_transition_tables_mean_those_of_the_trigger(
    db: psycopg.Connection[Any], mallory: psycopg.Connection[Any]
) -> None:
    watch(db, "lair.t")
    mallory.execute("insert into lair.t values (1)")
    mallory.execute("insert into lair.t select g from generate_series(2, 40) g")
    mallory.execute("update lair.t set id = -id")
    mallory.execute("delete from lair.t")
    assert rows(db, "select text from public.secret") == [(SECRET,)]
    assert len(mutations(db)) == 40 * 3


def test_a_table_stops_publishing_when_its_owner_loses_the_stream(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    role = cast.role("app")
    db.execute(sql.SQL("create schema app authorization {}").format(sql.Identifier(role)))
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    app = cast.acting(role)
    app.execute("create table app.users (id int primary key)")
    watch(app, "app.users")
    app.execute("insert into app.users values (1)")
    assert len(mutations(db)) == 1
    assert rows(db, "select stream from pgmb.table_mutations()") == [("main",)]
    db.execute("select pgmb.revoke_stream('main', %s)", [role])
    for statement in (
        "insert into app.users values (2)",
        "update app.users set id = 3",
        "delete from app.users",
        "truncate app.users",
    ):
        refused(app, statement)
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not publish to stream"):
            db.execute(statement)
    assert mutations(db) == []
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    app.execute("insert into app.users values (2)")
    assert len(mutations(db)) == 1
    # An admin's trigger does not depend on the table's owner.
    db.execute("select pgmb.revoke_stream('main', %s)", [role])
    watch(db, "app.users")
    app.execute("insert into app.users values (3)")
    assert len(mutations(db)) == 1
