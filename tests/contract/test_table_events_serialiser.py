"""Table events: the serialiser that the user may replace, kept by upgrades."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgmb import schema
from tests.contract.mutations import Mutation, mutations, watch

README = """
CREATE OR REPLACE FUNCTION serialise_record_for_event(
	tabl oid,
	op TEXT, -- 'INSERT', 'UPDATE', 'DELETE'
	record RECORD,
	serialised OUT JSONB,
	emit OUT BOOLEAN
) AS $$
BEGIN
	if tabl = 'public.users'::regclass THEN
		serialised := jsonb_build_object(
			'id', record.id,
			'name', record.name
			-- note: we're omitting email & created_at from the event payload
		);
		-- don't emit events for spam users, just a demo condition
		emit := record.email NOT LIKE '%@spam.com';
		RETURN;
	END IF;

	-- add other table customisations here, if needed

	serialised := to_jsonb(record);
	emit := TRUE;
END
$$ LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
	SECURITY INVOKER;
"""

SIZES = pytest.mark.parametrize("size", [4, 60])


@pytest.fixture
def users(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The table and function of @haathie/pgmb's README, as they stand there."""
    db.execute(
        "CREATE TABLE users (id SERIAL PRIMARY KEY, created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),"
        " name TEXT NOT NULL, email TEXT NOT NULL UNIQUE); CREATE TABLE notes (id int primary key, note text)"
    )
    watch(db, "users")
    watch(db, "notes")
    db.execute("set search_path = pgmb, public")
    db.execute(README)
    db.execute("reset search_path")
    return db


def fill(db: psycopg.Connection[Any], size: int) -> None:
    db.execute(
        "insert into users (name, email)"
        " select 'user ' || n, n || case n % 4 when 0 then '@spam.com' else '@x.org' end"
        f" from generate_series(1, {size}) n"
    )


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"user {number}"}


@SIZES
def test_it_decides_and_reshapes(users: psycopg.Connection[Any], size: int) -> None:
    good = [n for n in range(1, size + 1) if n % 4]
    fill(users, size)
    assert mutations(users) == [Mutation("public.users.insert", str(n), row(n)) for n in good]
    users.execute("update users set name = 'new'")
    found = sorted(mutations(users), key=lambda m: m.row["id"])
    assert found == [
        Mutation("public.users.update", str(n), {"id": n, "name": "new"}, row(n), {"name": "new"})
        for n in good
    ]
    users.execute("delete from users")
    assert sorted(m.row["id"] for m in mutations(users)) == good
    users.execute("insert into notes values (1, 'kept as it is')")
    users.execute("truncate users")
    assert mutations(users) == [
        Mutation("public.notes.insert", "1", {"id": 1, "note": "kept as it is"}),
        Mutation("public.users.truncate", None, None),
    ]


@SIZES
def test_what_it_leaves_out_appears_nowhere(users: psycopg.Connection[Any], size: int) -> None:
    """Not in the old row either; a change of nothing else is none."""
    fill(users, size)
    users.execute("update users set email = 'secret' || id where id = 1")
    users.execute("update users set email = 'secret_' || id || '@x.org', name = 'n' where id <> 2")
    users.execute("delete from users")
    texts = users.execute("select topic, concat(payload, headers) from pgmb.log_main").fetchall()
    assert len([topic for topic, _ in texts if topic.endswith("update")]) == size - 1
    assert not [text for _, text in texts if "secret" in text or "@" in text]


def test_an_update_is_published_if_it_says_so_of_the_new_row(users: psycopg.Connection[Any]) -> None:
    users.execute("insert into users (name, email) values ('a', 'a@spam.com'), ('b', 'b@x.org')")
    mutations(users)
    users.execute(
        "update users set name = name || '!', email = case id when 1 then 'a@x.org' else 'b@spam.com' end"
    )
    assert [m.row for m in mutations(users)] == [{"id": 1, "name": "a!"}]


def replace(db: psycopg.Connection[Any], body: str) -> None:
    db.execute(
        "create or replace function pgmb.serialise_record_for_event(tabl oid, op text, record record,"
        f" serialised out jsonb, emit out boolean) language plpgsql as $$ begin {body} end $$"
    )


@SIZES
def test_what_it_returns_need_not_be_an_object(db: psycopg.Connection[Any], size: int) -> None:
    db.execute("create table t (id int primary key, n int)")
    watch(db, "t")
    replace(db, "emit := record.id <> 2; serialised := case when record.id <> 3 then to_jsonb(record.n) end;")
    db.execute(f"insert into t select n, n from generate_series(1, {size}) n")
    assert [m.row for m in mutations(db)] == [None if n == 3 else n for n in range(1, size + 1) if n != 2]
    db.execute("update t set n = -n")
    found = mutations(db)
    assert sorted((m.row, m.old, str(m.changed)) for m in found) == sorted(
        (-n, n, "{}") for n in range(1, size + 1) if n not in {2, 3}
    )
    replace(db, "emit := null;")
    db.execute("delete from t")
    assert mutations(db) == []


def test_it_learns_the_operation(db: psycopg.Connection[Any]) -> None:
    db.execute("create table t (id int primary key)")
    watch(db, "t")
    replace(db, "emit := true; serialised := jsonb_build_array(op, record.id, tabl::regclass);")
    db.execute("insert into t values (1)")
    db.execute("update t set id = 2")
    db.execute("delete from t")
    assert [m.row for m in mutations(db)] == [
        ["INSERT", 1, "public.t"],
        ["UPDATE", 2, "public.t"],
        ["DELETE", 2, "public.t"],
    ]


def test_what_it_raises_fails_the_statement(db: psycopg.Connection[Any]) -> None:
    db.execute("create table t (id int primary key)")
    watch(db, "t")
    replace(db, "emit := true; serialised := 1 / (record.id - 5);")
    db.execute("insert into t values (1)")
    with pytest.raises(psycopg.errors.DivisionByZero) as caught:
        db.execute("insert into t values (5)")
    assert "serialise_record_for_event" in (caught.value.diag.context or "")
    assert db.execute("select id from t").fetchall() == [(1,)]


def test_an_upgrade_keeps_it(users: psycopg.Connection[Any]) -> None:
    definition = (
        "select pg_get_functiondef('pgmb.serialise_record_for_event(oid, text, record)'::regprocedure)"
    )
    before = users.execute(definition).fetchone()
    schema.install(users)
    users.execute(schema.emit())
    assert users.execute(definition).fetchone() == before
    users.execute("insert into users (name, email) values ('a', 'a@x.org')")
    assert [m.row for m in mutations(users)] == [{"id": 1, "name": "a"}]
    # The way back to ours.
    users.execute("drop function pgmb.serialise_record_for_event(oid, text, record)")
    users.execute("update users set email = 'b'")
    assert [m.changed for m in mutations(users)] == [{"email": "b"}]
    schema.install(users)
    assert users.execute("select pgmb_internal.serialiser_is_custom()").fetchone() == (False,)
    users.execute("update users set email = 'c'")
    assert [m.changed for m in mutations(users)] == [{"email": "c"}]


def test_the_default_edited_in_place_is_called_and_kept(users: psycopg.Connection[Any]) -> None:
    users.execute("drop function pgmb.serialise_record_for_event(oid, text, record)")
    schema.install(users)
    ((default,),) = users.execute(
        "select pg_get_functiondef('pgmb.serialise_record_for_event(oid, text, record)'::regprocedure)"
    ).fetchall()
    users.execute(default.replace("to_jsonb(record);", "to_jsonb(record) - 'email';").encode())
    schema.install(users)
    users.execute("insert into users (name, email) values ('a', 'a@x.org')")
    assert [sorted(m.row) for m in mutations(users)] == [["created_at", "id", "name"]]


def test_the_default_is_what_is_published_without_it(db: psycopg.Connection[Any]) -> None:
    db.execute("create table t (id int primary key, at timestamptz default '2026-01-01 00:00Z', a int[])")
    watch(db, "t")
    body = db.execute("select prosrc from pg_proc where proname = 'serialise_record_for_event'").fetchone()
    assert body is not None
    db.execute("insert into t values (1)")
    replace(db, "serialised := to_jsonb(record); emit := true;")
    db.execute("insert into t values (2)")
    first, second = mutations(db)
    assert first.row | {"id": 2} == second.row
    assert "to_jsonb(record)" in body[0]


def test_nobody_else_may_replace_it(db: psycopg.Connection[Any]) -> None:
    db.execute("set role pgmb_publisher")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        db.execute(README.replace("FUNCTION serialise", "FUNCTION pgmb.serialise"))
    db.execute("set role pgmb_admin")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        db.execute(README.replace("FUNCTION serialise", "FUNCTION pgmb.serialise"))
    db.execute("reset role")
