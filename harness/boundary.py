"""The boundary of ADR 26: pgmb holds what the reference documents, pgmb_internal is for its owner only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "sql.md"


def documented() -> set[str]:
    """The names of the functions that the reference has an entry for."""
    return set(re.findall(r"^### (\w+)$", REFERENCE.read_text(), re.MULTILINE))


def public_functions(db: psycopg.Connection[Any]) -> set[str]:
    rows = db.execute("select proname::text from pg_proc where pronamespace = 'pgmb'::regnamespace")
    return {name for (name,) in rows}


def undocumented(db: psycopg.Connection[Any]) -> list[str]:
    """Functions in schema pgmb that the reference does not document."""
    return sorted(public_functions(db) - documented())


def missing(db: psycopg.Connection[Any]) -> list[str]:
    """Functions that the reference documents and schema pgmb does not have."""
    return sorted(documented() - public_functions(db))


def open_internals(db: psycopg.Connection[Any]) -> list[str]:
    """What PUBLIC or a role other than the owner is granted on schema pgmb_internal and its functions."""
    rows = db.execute(
        """
        select format('%s has %s on %s', coalesce(r.rolname, 'PUBLIC'), a.privilege_type, o.name)
        from (
          select n.nspname::text, n.nspacl, n.nspowner from pg_namespace n where n.nspname = 'pgmb_internal'
          union all
          select p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner)), p.proowner
          from pg_proc p where p.pronamespace = 'pgmb_internal'::regnamespace
        ) o (name, acl, owner)
        cross join lateral aclexplode(o.acl) a
        left join pg_roles r on r.oid = a.grantee
        where a.grantee <> o.owner
        order by 1
        """
    )
    return [line for (line,) in rows]
