"""What the catalog says about the schema: rights, definers, search paths, and what the roles may call."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

FUNCTIONS = "pg_proc p where p.pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[])"


def names(db: psycopg.Connection[Any], query: str) -> list[str]:
    return [row[0] for row in db.execute(query).fetchall()]


def test_no_function_is_executable_by_public(db: psycopg.Connection[Any]) -> None:
    assert len(names(db, f"select p.proname from {FUNCTIONS}")) > 50
    assert (
        names(
            db,
            f"select p.oid::regprocedure::text from {FUNCTIONS} and (p.proacl is null or exists ("
            " select from aclexplode(p.proacl) a where a.grantee = 0))",
        )
        == []
    )


def test_no_function_of_a_new_stream_or_queue_is_executable_by_public(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('s')")
    db.execute("select pgmb.create_queue('q', stream => 's')")
    db.execute("select pgmb.rotate('s')")
    test_no_function_is_executable_by_public(db)
    test_public_has_no_right_on_any_relation_or_the_schema(db)


def test_every_definer_function_pins_its_search_path(db: psycopg.Connection[Any]) -> None:
    assert len(names(db, f"select p.proname from {FUNCTIONS} and p.prosecdef")) > 20
    assert (
        names(
            db,
            f"select p.oid::regprocedure::text from {FUNCTIONS} and p.prosecdef and not coalesce("
            " 'search_path=pg_catalog, pg_temp' = any (p.proconfig), false)",
        )
        == []
    )


def test_a_function_that_pins_its_plans_does_not_compile_them(db: psycopg.Connection[Any]) -> None:
    """A forbidden kind of scan costs 10^10, so JIT would compile every plan that needs one."""
    pinning = f"{FUNCTIONS} and 'enable_seqscan=off' = any (p.proconfig)"
    assert len(names(db, f"select p.proname from {pinning}")) > 10
    assert names(db, f"select p.proname from {pinning} and not 'jit=off' = any (p.proconfig)") == []


def test_every_trigger_function_pins_its_search_path(db: psycopg.Connection[Any]) -> None:
    """It runs in whatever session commits."""
    assert (
        names(
            db,
            "select p.oid::regprocedure::text from pg_trigger t join pg_proc p on p.oid = t.tgfoid"
            " where p.pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[]) and not coalesce("
            " 'search_path=pg_catalog, pg_temp' = any (p.proconfig), false)",
        )
        == []
    )


def test_every_definer_function_asks_who_calls(db: psycopg.Connection[Any]) -> None:
    """Either itself, or it is for admins' EXECUTE alone, or it gives away no event."""
    asked = (
        "assert_admin|assert_consumer|assert_reader|readable_stream|queue_for_consumer|lanes_for_consumer|ack_lease"
        "|settle_as_failed|caller|assert_publisher|may_publish|may_consume|may_read|assert_between"
    )
    open_to_all = set(
        names(
            db,
            f"select distinct p.proname::text from {FUNCTIONS} and p.prosecdef and p.prosrc !~ '{asked}'"
            " and exists (select from aclexplode(p.proacl) a where a.grantee::regrole::text"
            "   in ('pgmb_publisher', 'pgmb_consumer'))",
        )
    )
    assert open_to_all <= {
        "position",
        "earliest",
        "position_at",
        "position_of",
        "tick",
        # The caller gives the events.
        "passing",
        # Names and counts, no events.
        "describe_streams",
        "describe_broker",
        # To one who knows the key, the id of the event that has it.
        "holder_of_key",
    }


def test_public_has_no_right_on_any_relation_or_the_schema(db: psycopg.Connection[Any]) -> None:
    assert (
        names(
            db,
            "select c.oid::regclass::text from pg_class c, aclexplode(c.relacl) a"
            " where c.relnamespace = 'pgmb'::regnamespace and a.grantee = 0",
        )
        == []
    )
    assert (
        names(
            db,
            "select n.nspname::text from pg_namespace n, aclexplode(n.nspacl) a"
            " where n.nspname in ('pgmb', 'pgmb_internal') and a.grantee = 0",
        )
        == []
    )


@pytest.mark.parametrize("role", ["pgmb_publisher", "pgmb_consumer"])
def test_plain_roles_can_write_no_table_but_the_log_the_delayed_and_keys(
    db: psycopg.Connection[Any], role: str
) -> None:
    written = set(
        names(
            db,
            "select distinct c.relname::text from pg_class c where c.relnamespace = 'pgmb'::regnamespace"
            f" and c.relkind in ('r', 'p') and (has_any_column_privilege('{role}', c.oid, 'insert, update')"
            f" or has_table_privilege('{role}', c.oid, 'delete, truncate, trigger, references'))",
        )
    )
    assert written == ({"log_main", "delayed", "dedup"} if role == "pgmb_publisher" else set())


def test_roles_own_nothing_and_cannot_log_in(db: psycopg.Connection[Any]) -> None:
    rows = db.execute(
        "select rolname, rolcanlogin, rolsuper, rolcreaterole, rolcreatedb, rolbypassrls from pg_roles"
        " where rolname like 'pgmb\\_%' and rolname in ('pgmb_publisher', 'pgmb_consumer', 'pgmb_admin')"
        " order by 1"
    ).fetchall()
    assert rows == [
        (name, False, False, False, False, False)
        for name in ("pgmb_admin", "pgmb_consumer", "pgmb_publisher")
    ]


def test_no_extension_is_needed(db: psycopg.Connection[Any]) -> None:
    assert names(db, "select extname::text from pg_extension") == ["plpgsql"]
    assert names(
        db,
        f"select distinct l.lanname::text from {FUNCTIONS.replace('pg_proc p', 'pg_language l, pg_proc p')}"
        " and l.oid = p.prolang order by 1",
    ) == ["plpgsql", "sql"]


def test_every_foreign_key_has_an_index_that_serves_it(db: psycopg.Connection[Any]) -> None:
    """Otherwise dropping a queue or stream walks the whole of the other table."""
    rows = names(
        db,
        "select c.conrelid::regclass::text || '.' || c.conname from pg_constraint c"
        " where c.contype = 'f' and c.connamespace = 'pgmb'::regnamespace and not exists ("
        "   select from pg_index i where i.indrelid = c.conrelid and i.indkey[0] = c.conkey[1])",
    )
    assert rows == []
