"""Rules over the catalog that hold for every table, function and role to come.

Each rule returns its violations as lines of text. test_catalog_rules.py expects none, and checks that
each rule catches a violation.
"""

from __future__ import annotations

from typing import Any

import psycopg

SCHEMAS = "('pgmb', 'pgmb_condition', 'pgmb_parser', 'pgmq')"
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
