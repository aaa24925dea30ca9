"""Promise: no name in a PL/pgSQL function means both a variable and a column.

PostgreSQL raises 42702 when it plans a statement with such a name, unless the function decides for one of the
two by `#variable_conflict`. Deciding hides mistakes: `g.number = number - 1` compared a column with itself.
So no function decides, and plpgsql_check plans every statement of every function. It is a Debian package for
PostgreSQL 15, needed by this test only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

import pgmb
from harness.postgres import Server
from pgmb import schema

SOURCES = Path(pgmb.__file__).parent / "sql"
CHECK = """
select p.oid::regprocedure || ', line ' || coalesce(found.lineno::text, '?') || ': ' || found.message
from pg_proc p
join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
left join lateral (select t.tgrelid from pg_trigger t where t.tgfoid = p.oid limit 1) used on true
cross join lateral plpgsql_check_function_tb(p.oid, coalesce(used.tgrelid, 0), fatal_errors => false,
  extra_warnings => true, performance_warnings => false) found
where p.pronamespace = any ('{pgmb,pgmb_internal,pgmb_condition,pgmq}'::regnamespace[])
  and (p.prorettype <> 'trigger'::regtype or used.tgrelid is not null)
"""
# Functions with a record that dynamic SQL fills, whose columns plpgsql_check cannot know.
DYNAMIC = {
    *("pgmb_internal.choose", "pgmb_internal.count_newest", "pgmb_internal.count_waiting"),
    *("pgmb.bury_unreadable", "pgmb_internal.still_to_come"),
    *(
        "pgmb_internal.stragglers",
        "pgmb_internal.take_next",
        "pgmb_internal.pick_in_turn",
        "pgmb_internal.take_lagging",
        "pgmb.receive",
    ),
}


def findings(connection: psycopg.Connection[Any], condition: str) -> list[str]:
    return [line for (line,) in connection.execute(cast("Any", f"{CHECK} and {condition}"))]


@pytest.fixture(scope="module")
def server_with_check() -> Iterator[Server]:
    with Server.start(15, name="plpgsql", memory=True) as server:
        schema.install(server.dsn(), compat=["pgmq"])
        with server.connect() as connection:
            connection.execute("create extension plpgsql_check")
        yield server


@pytest.fixture
def checked(server_with_check: Server) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server_with_check.dsn()) as connection:
        yield connection
        connection.rollback()


@pytest.mark.once(15)
def test_every_statement_of_every_function_can_be_planned(checked: psycopg.Connection[Any]) -> None:
    """No ambiguous name, no missing column, table or function, no wrong type."""
    assert findings(checked, "found.level = 'error' and found.sqlstate not in ('55000', 'XX000')") == []
    undetermined = findings(checked, "found.sqlstate in ('55000', 'XX000')")
    assert {line.split("(")[0] for line in undetermined} <= DYNAMIC


@pytest.mark.once(15)
def test_every_variable_is_read(checked: psycopg.Connection[Any]) -> None:
    found = findings(checked, "found.message ~ 'never read variable|unused variable|overlapped'")
    assert [line for line in found if line.split("(")[0] not in DYNAMIC] == []


@pytest.mark.once(15)
def test_the_check_finds_an_ambiguous_name(checked: psycopg.Connection[Any]) -> None:
    checked.execute(
        "create function pgmb.wrong() returns bigint language plpgsql as $$ declare number integer := 1;"
        " begin return (select count(*) from pgmb.segment g where g.number = number); end $$"
    )
    found = findings(checked, "found.sqlstate = '42702'")
    assert [line.split("(")[0] for line in found] == ["pgmb.wrong"]


def lines_with(pattern: str) -> list[str]:
    return [
        f"{path.relative_to(SOURCES)}:{number}"
        for path in sorted(SOURCES.rglob("*.sql"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_no_function_decides_between_variable_and_column() -> None:
    assert lines_with("variable_conflict") == []


def test_no_handler_catches_a_whole_class_of_errors_by_a_code() -> None:
    """PL/pgSQL takes a code that ends in 000 for all codes of its class: MB000 caught MB013 too."""
    assert lines_with(r"sqlstate '..000'") == []
