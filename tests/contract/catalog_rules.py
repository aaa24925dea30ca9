"""Rules over the catalog that hold for every table, function and role to come.

Each rule returns its violations as lines of text. test_catalog_rules.py expects none, and checks that
each rule catches a violation.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg

SCHEMAS = "('pgmb', 'pgmb_internal', 'pgmb_condition', 'pgmb_parser', 'pgmq')"
"""Every schema that an installation makes."""

HARMFUL = ("UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER", "MAINTAIN")
"""Privileges on a table that let a role lock it, remove rows, or run its own code in others' statements."""


def lines(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> list[str]:
    return [row[0] for row in db.execute(statement, parameters).fetchall()]


def harmful_grants(db: psycopg.Connection[Any]) -> list[str]:
    """Tables, views and columns on which a role other than the owner has a harmful privilege."""
    return lines(
        db,
        f"""
        select format('%%s has %%s on %%s', coalesce(r.rolname, 'PUBLIC'), a.privilege_type, c.oid::regclass)
        from pg_class c
        cross join lateral (
          select * from aclexplode(c.relacl)
          union all
          select x.* from pg_attribute t cross join lateral aclexplode(t.attacl) x where t.attrelid = c.oid
        ) a
        left join pg_roles r on r.oid = a.grantee
        where c.relnamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          and c.relkind in ('r', 'p', 'v', 'm', 'f') and a.grantee <> c.relowner
          and a.privilege_type = any (%s)
        order by 1
        """,
        list(HARMFUL),
    )


def harmful_sequence_grants(db: psycopg.Connection[Any]) -> list[str]:
    """Sequences that a role other than the owner can set: with UPDATE it can run setval()."""
    return lines(
        db,
        f"""
        select format('%%s has %%s on %%s', coalesce(r.rolname, 'PUBLIC'), a.privilege_type, c.oid::regclass)
        from pg_class c
        cross join lateral aclexplode(c.relacl) a
        left join pg_roles r on r.oid = a.grantee
        where c.relnamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          and c.relkind = 'S' and a.grantee <> c.relowner and a.privilege_type = 'UPDATE'
        order by 1
        """,
    )


def open_to_public(db: psycopg.Connection[Any]) -> list[str]:
    """Functions, relations and schemas of an installation on which PUBLIC has any privilege."""
    return lines(
        db,
        f"""
        select format('PUBLIC has %%s on %%s', a.privilege_type, o.name)
        from (
          select p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner)) from pg_proc p
          where p.pronamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          union all
          select c.oid::regclass::text, c.relacl from pg_class c
          where c.relnamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          union all
          select n.nspname, n.nspacl from pg_namespace n where n.nspname in {SCHEMAS}
        ) o (name, acl)
        cross join lateral aclexplode(o.acl) a
        where a.grantee = 0
        order by 1
        """,
    )


def unbounded_columns(db: psycopg.Connection[Any]) -> list[str]:
    """Columns of any length, of tables that hold what callers give, without a check on their length."""
    return lines(
        db,
        """
        select format('%%s.%%s', c.relname, a.attname)
        from pg_class c
        join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        join pg_type t on t.oid = a.atttypid
        where c.relnamespace = 'pgmb'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
          -- What is staged is checked when it is published.
          and c.relname !~ '^stage_[0-9]+$'
          -- A domain has its own check.
          and t.typtype <> 'd'
          and (t.typname = any ('{text,varchar,json,jsonb,bytea,jsonpath}') or t.typcategory = 'A')
          and not exists (
            select from pg_constraint k
            where k.conrelid = c.oid and k.contype = 'c' and k.conkey = array[a.attnum]
              and pg_get_constraintdef(k.oid) ~ '(length|pg_column_size|cardinality|~ |= ANY)')
        order by 1
        """,
    )


def lesser_owners(db: psycopg.Connection[Any]) -> list[str]:
    """What a role other than the owner owns or can replace, beyond pgmb_parser and pgmb_matcher (ADR 15)."""
    return lines(
        db,
        f"""
        with owner as (select nspowner as role from pg_namespace where nspname = 'pgmb')
        select format('schema %%s belongs to %%s', n.nspname, n.nspowner::regrole)
        from pg_namespace n, owner where n.nspname in {SCHEMAS} and n.nspowner <> owner.role
        union all
        select format('%%s may create in schema %%s', coalesce(a.grantee::regrole::text, 'PUBLIC'), n.nspname)
        from pg_namespace n, owner, aclexplode(n.nspacl) a
        where n.nspname in {SCHEMAS} and a.privilege_type = 'CREATE' and a.grantee <> owner.role
          and (n.nspname, a.grantee) not in (
            ('pgmb_condition', 'pgmb_matcher'::regrole), ('pgmb_parser', 'pgmb_parser'::regrole))
        union all
        select format('function %%s belongs to %%s', p.oid::regprocedure, p.proowner::regrole)
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace, owner
        where n.nspname in {SCHEMAS} and p.proowner <> owner.role
          and not (p.prosecdef and case n.nspname
            when 'pgmb_condition' then p.proowner = 'pgmb_matcher'::regrole
            when 'pgmb_parser' then p.proowner = 'pgmb_parser'::regrole and p.proname = 'parse'
            else false end)
        union all
        select format('relation %%s belongs to %%s', c.oid::regclass, c.relowner::regrole)
        from pg_class c join pg_namespace n on n.oid = c.relnamespace, owner
        where n.nspname in {SCHEMAS} and c.relkind in ('r', 'p', 'v', 'S') and c.relowner <> owner.role
        """,
    )


def unchecked_calls(db: psycopg.Connection[Any]) -> list[str]:
    """Functions that name pgmb_condition or pgmb_parser without run_as(), which checks what will run."""
    return [
        name
        for name, body in _bodies(db)
        if re.search(r"(select|perform|from)\s+pgmb_(condition|parser)\.", body)
        or (re.search(r"'match'|'parse'", body) and "pgmb_internal.run_as(" not in body)
    ]


def loose_definers(db: psycopg.Connection[Any]) -> list[str]:
    """Functions that run with their owner's rights and a search_path that a caller could decide."""
    return lines(
        db,
        f"""
        select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace in (select oid from pg_namespace where nspname in {SCHEMAS}) and p.prosecdef
          and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)
        order by 1
        """,
    )


def unqualified_names(db: psycopg.Connection[Any]) -> list[str]:
    """Names of relations and types in functions that pg_temp could answer.

    With the search_path of definers, pg_catalog is searched first, and pg_temp for relations and types alone.
    Their inner functions run with the same path, and so all functions count. What a statement in quotes names
    counts too.
    """
    relations = {name for (name,) in db.execute("select relname from pg_class where relnamespace = 11")}
    types = {name for (name,) in db.execute("select typname from pg_type where typnamespace = 11")}
    found = []
    for function, body in _bodies(db):
        text = re.sub(r"\braise exception .*?;\n", "", _without_comments(body), flags=re.DOTALL)
        own = {*_CTE.findall(text), *_VARIABLE.findall(text)}
        if re.match(r"pgmb_internal\.(publish_mutations|mutation_statement)\(", function):
            # The transition tables, which publish_mutations makes sure of.
            own |= {"new_rows", "old_rows"}
        found += [
            f"{function}: relation {name}" for name in _RELATION.findall(text) if name not in relations | own
        ]
        found += [f"{function}: type {name}" for name in _TYPE.findall(text) if name not in types]
    return sorted(set(found))


def trusting_the_session(db: psycopg.Connection[Any]) -> list[str]:
    """Functions that decide by the session's role, but for those that tell who the caller is."""
    return [
        name
        for name, body in _bodies(db)
        if name not in ("pgmb_internal.caller()", "pgmb_internal.caller_at_low_cost()")
        and re.search(
            r"\bsession_user\b|current_setting\(\s*'role'|\bsession_authorization\b", _without_comments(body)
        )
    ]


def admin_calls_for_others(db: psycopg.Connection[Any]) -> list[str]:
    """Functions for admins that a role other than the owner and pgmb_admin may execute."""
    return lines(
        db,
        f"""
        select format('%%s may execute %%s', coalesce(r.rolname, 'PUBLIC'), p.oid::regprocedure)
        from pg_proc p
        cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
        left join pg_roles r on r.oid = a.grantee
        where p.pronamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          and p.prosrc like '%%perform pgmb_internal.assert_admin();%%'
          and a.grantee not in (p.proowner, 'pgmb_admin'::regrole)
        order by 1
        """,
    )


def untimed(db: psycopg.Connection[Any]) -> list[str]:
    """Functions with the owner's rights that reach a user's filter or condition without asking for a timeout.

    rebase() may: it belongs to an operator after a restore, and must not be cut off.
    """
    bodies: dict[str, str] = {}
    for signature, body in _bodies(db):
        text = re.sub(r"\braise exception .*?;\n", "", _without_comments(body), flags=re.DOTALL)
        bodies[signature.split("(")[0]] = bodies.get(signature.split("(")[0], "") + text
    calls = {
        name: set()
        if re.search(r"pgmb_internal\.(assert|needs)_timeout\(", text)
        else set(_CALL.findall(text))
        for name, text in bodies.items()
    }
    writing = {"pgmb_internal.asking", "pgmb_internal.filtering"}
    reached = {name for name, called in calls.items() if called & writing} - writing
    while more := {name for name, called in calls.items() if called & reached} - reached:
        reached |= more
    definers = "select distinct p.oid::regproc::text from pg_proc p where p.prosecdef"
    return sorted(reached & set(lines(db, definers)) - {"pgmb.rebase"})


_CALL = re.compile(r"(pgm(?:b|b_internal|q)\.\w+)\(")
_CTE = re.compile(
    r"(?:with(?: recursive)?|,|\))\s*(\w+)\s*(?:\([^()]*\))?\s+as\s+(?:(?:not )?materialized )?\("
)
_VARIABLE = re.compile(r"^\s*(\w+)\s+(?:constant\s+)?[\w.\"%\[\]]+\s*(?::=[^;]*)?;", re.MULTILINE)
_RELATION = re.compile(
    r"(?<!distinct )\b(?:from|join|update|insert into|truncate|lock table)\s+(?:only\s+)?"
    r"(?!(?:only|set|select|lateral|skip|of|nothing|where|public|exclusive|call)\b)([a-z_]\w*)\b(?!\s*[.(%])"
)
_TYPE = re.compile(
    r"::(?!(?:integer|int|bigint|boolean|smallint|double|bit|timestamp)\b)([a-z_]\w*)\b(?![.\w])"
)


def _bodies(db: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    return db.execute(
        "select p.oid::regprocedure::text, p.prosrc"
        " from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        f" where n.nspname in {SCHEMAS} and p.proname !~ '^c_[0-9a-f]{{40}}$' order by 1"
    ).fetchall()


def _without_comments(body: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/", "", body, flags=re.DOTALL)


def uncleared_queue_numbers(db: psycopg.Connection[Any]) -> list[str]:
    """Tables with a queue's number that drop_queue does not cascade to and maintenance does not clear."""
    return lines(
        db,
        f"""
        select c.oid::regclass::text from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace in (select oid from pg_namespace where nspname in {SCHEMAS})
          and c.relkind in ('r', 'p') and a.atttypid = 'integer'::regtype
          and a.attname in ('queue', 'queue_id', 'lane_of') and not a.attisdropped
          and not exists (
            select from pg_constraint f
            where f.conrelid = c.oid and f.contype = 'f' and f.confdeltype = 'c'
              and f.conkey = array[a.attnum])
          and c.oid <> all (pgmb_internal.tables_without_key())
        order by 1
        """,
    )
