"""What PGMQ's own SQL offers, ours offers too: functions with their parameters, types, columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

# What PGMQ keeps to itself begins with an underscore.
NOT_OURS: dict[str, str] = {
    "notify_queue_listeners()": "a trigger of its own tables; ours is on pgmb.tick and has the same name",
}


def asked(dsn: str, statement: str) -> set[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return set(connection.execute(statement.encode()).fetchall())


def test_functions(systems: Callable[[str], str]) -> None:
    statement = """
        select p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')',
          pg_get_function_result(p.oid), pg_get_function_arguments(p.oid)
        from pg_proc p
        where p.pronamespace = 'pgmq'::regnamespace and p.proname !~ '^_'"""
    missing = asked(systems("pgmq"), statement) - asked(systems("pgmb"), statement)
    assert {one for one in missing if one[0] not in NOT_OURS} == set()


def test_types(systems: Callable[[str], str]) -> None:
    statement = """
        select t.typname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod)
        from pg_type t join pg_attribute a on a.attrelid = t.typrelid
        join pg_class c on c.oid = t.typrelid
        where t.typnamespace = 'pgmq'::regnamespace and c.relkind = 'c'"""
    assert asked(systems("pgmq"), statement) == asked(systems("pgmb"), statement)


def test_relations(systems: Callable[[str], str]) -> None:
    for system in ("pgmq", "pgmb"):
        with psycopg.connect(systems(system), autocommit=True) as connection:
            connection.execute("select pgmq.create('compared')")
    statement = """
        select c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod)
        from pg_class c join pg_attribute a on a.attrelid = c.oid
        where c.relnamespace = 'pgmq'::regnamespace and a.attnum > 0
          and c.relname in ('meta', 'topic_bindings', 'notify_insert_throttle', 'q_compared', 'a_compared')"""
    try:
        assert asked(systems("pgmq"), statement) == asked(systems("pgmb"), statement)
    finally:
        for system in ("pgmq", "pgmb"):
            with psycopg.connect(systems(system), autocommit=True) as connection:
                connection.execute("select pgmq.drop_queue('compared')")


def test_no_function_is_for_everybody(systems: Callable[[str], str]) -> None:
    assert (
        asked(
            systems("pgmb"),
            """
        select p.oid::regprocedure::text from pg_proc p
        cross join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        where (p.pronamespace = 'pgmq'::regnamespace or p.proname ~ '^pgmq_') and a.grantee = 0""",
        )
        == set()
    )
    assert (
        asked(
            systems("pgmb"),
            """
        select c.oid::regclass::text from pg_class c
        cross join aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
        where c.relnamespace = 'pgmq'::regnamespace and a.grantee = 0""",
        )
        == set()
    )


def test_definer_functions_pin_their_search_path(systems: Callable[[str], str]) -> None:
    found = asked(
        systems("pgmb"),
        """
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'pgmq'::regnamespace and p.prosecdef
          and not coalesce(p.proconfig @> array['search_path=pg_catalog, pg_temp'], false)""",
    )
    assert found == set()
