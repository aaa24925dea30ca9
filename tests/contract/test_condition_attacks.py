"""Code of the author of an SQL condition runs as no other role: the roles that parse and run own nothing.

What hostile conditions try is in tests/adversary/test_condition_author.py.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from harness.states import paused_queues
from tests.contract.cast import Cast
from tests.contract.test_privileges import rows

TYPES = [
    "grant usage on schema tools, e to public",
    "create sequence e.ran",
    "grant usage on sequence e.ran to public",
    (
        "create function tools.run(int) returns boolean language plpgsql immutable as"
        " $$begin perform nextval('e.ran'); return true; end$$"
    ),
    "create domain tools.evil as int check (tools.run(value))",
    "create domain e.topic as int check (tools.run(value))",
    'create domain tools."e" as int check (tools.run(value))',
    "create domain pg_temp.lower as int check (tools.run(value))",
    "create type tools.pair as (one tools.evil)",
    "create type tools.span as range (subtype = tools.evil)",
    "create type e.span as range (subtype = tools.evil)",
]
"""Types whose checks draw from e.ran when they run."""


@pytest.fixture
def author(db: psycopg.Connection[Any], cast: Cast) -> psycopg.Connection[Any]:
    """A role that may write conditions, with types of its own. Whatever of them runs draws from e.ran."""
    role = cast.role("author", "pgmb_conditions", "pgmb_consumer", "pgmb_publisher", "pgmb_admin")
    for schema in ("tools", "e"):
        db.execute(
            sql.SQL("create schema {} authorization {}").format(sql.Identifier(schema), sql.Identifier(role))
        )
    acting = cast.acting(role)
    acting.execute("set statement_timeout = '60s'")
    for statement in TYPES:
        acting.execute(statement.encode())
    return acting


HARMLESS = [
    "e.topic = 'tools.evil'",
    "e.topic = $$tools.evil$$ or e.key = $x$ '::tools.evil $x$",
    "/* 'tools.evil /* */ */ e.topic = E'\\'::tools.evil' -- ::tools.evil",
    "pg_catalog.upper(e.topic)::pg_catalog.text operator(pg_catalog.=) 'A' collate pg_catalog.\"C\"",
    "(e).topic = (s).params ->> 'a.b' or e.payload['a']['b'] = '0.5' or 1.5e3 > .5",
    "cast(e.payload ->> 'n' as numeric(10, 2)) > 1 and e.id::uuid is not null",
    "e.published_at at time zone 'UTC' > timestamp '2024-01-01' and e.key is distinct from ''",
    'array_length(array[e.topic, "e"."key"], 1) = 2 and \'x\' in (e.topic)',
]


@pytest.mark.parametrize("condition", HARMLESS)
def test_what_looks_like_a_foreign_name_and_is_none_is_accepted(
    db: psycopg.Connection[Any], author: psycopg.Connection[Any], condition: str
) -> None:
    author.execute("drop domain pg_temp.lower")
    author.execute("select pgmb.create_queue('mine', condition => %s)", [condition])
    author.execute("select pgmb.publish('t', '{}')")
    assert len(rows(author, "select * from pgmb.receive('mine')")) <= 1
    assert "mine" not in paused_queues(db)


def test_the_owner_calls_nothing_that_the_parser_changed(
    db: psycopg.Connection[Any], author: psycopg.Connection[Any]
) -> None:
    """Should the parser ever be taken over, the owner does not run what it left behind."""
    db.execute("alter function pgmb_parser.parse security invoker")
    with pytest.raises(psycopg.DatabaseError, match="not as it was made"):
        author.execute("select pgmb.create_queue('mine', condition => 'true')")


def test_what_parses_owns_nothing_that_others_rely_on(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('mine', condition => 'e.seq > 0')")
    owned = "select p.oid::regproc::text from pg_proc p where p.proowner = %s::regrole order by 1"
    assert rows(db, owned, "pgmb_parser") == [("pgmb_parser.parse",)]
    assert all(name.startswith("pgmb_condition.") for (name,) in rows(db, owned, "pgmb_matcher"))
    assert (
        rows(
            db,
            "select n.nspname::text from pg_namespace n where n.nspname like 'pgmb%%' and n.nspowner <>"
            " (select o.nspowner from pg_namespace o where o.nspname = 'pgmb')",
        )
        == []
    )
    for role in ("pgmb_parser", "pgmb_matcher"):
        assert rows(
            db,
            "select n.nspname::text from pg_namespace n where n.nspname like 'pgmb%%'"
            " and has_schema_privilege(%s, n.oid, 'create')",
            role,
        ) == [("pgmb_condition" if role == "pgmb_matcher" else "pgmb_parser",)]
