"""The author of SQL conditions tries to have one run code, read what it may not, or act as another role."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.adversary.target import WITHOUT_CONDITIONS, Installations, Target, shortened
from tests.contract.test_condition_attacks import TYPES
from tests.contract.test_conditions import REFUSED as NO_CONDITIONS

MORE = [
    "query_to_xml('select 1', false, false, '')::text <> ''",
    "cursor_to_xml('c', 1, false, false, '') is null",
    "pg_ls_dir('.') = 'x'",
    "pg_stat_file('postgresql.conf') is null",
    "pg_read_binary_file('PG_VERSION') is null",
    "pg_logical_emit_message(true, 'a', 'b') is null",
    "pg_export_snapshot() is null",
    "pg_reload_conf()",
    "pg_cancel_backend(1)",
    "pg_promote()",
    "lo_import('/etc/passwd') = 0",
    "lo_export(1, '/tmp/x') = 0",
    "inet_server_addr() is null",
    "current_schemas(true) is null",
    "has_schema_privilege('pgmb', 'usage')",
    "pg_get_functiondef(1) is null",
    "pg_get_expr('x', 1) is null",
    "obj_description(1) is null",
    "'pgmb.queue'::regclass is null",
    "xmlserialize(document query_to_xml('select 1', true, true, '') as text) is null",
    "(select count(*) from pg_roles) > 0",
    "e.payload = any (select payload from pgmb.log_main)",
    "ts_stat('select 1') is null",
    "setseed(0.5) is null",
    "gen_random_uuid() is null",
    "version() is null or timeofday() is null",
]

OWN_CODE = [
    "'{1}'::tools.evil[] is not null",
    "'{1}' :: tools . evil [] is not null",
    "'{1}'::/**/tools/*x*/.--\n evil[] is not null",
    "cast('{1}' as tools.evil[]) is not null",
    "'(1)'::tools.pair is not null",
    "'[1,2]'::tools.span is not null",
    "tools.span '[1,2]' is not null",
    "tools.span('[1,2]') is not null",
    "e.span '[1,2]' is not null",
    "e.span('[1,2]') is not null",
    "'{1}'::e.topic[] is not null",
    "cast('{1}' as e.topic[]) is not null",
    '\'{1}\'::"tools"."evil"[] is not null',
    "'{1}'::U&\"\\0074ools\".evil[] is not null",
    "'{1}'::lower[] is not null",
    "'{1}'::LOWER[] is not null",
    "'{1}'::\"lower\"[] is not null",
    "'{1}'::pg_temp.lower[] is not null",
    "cast('{1}' as lower[]) is not null",
    # Strings and comments that end elsewhere than a careless reader thinks.
    "E'\\'' = '{1}'::tools.evil[]::text",
    "E'a'\n'b\\'' = '' or '{1}'::tools.evil[] is not null or '' = ''",
    "E'a' -- c\n'b\\'' = '' or '{1}'::tools.evil[] is not null or '' = ''",
    "$a$'$a$ = '{1}'::tools.evil[]::text",
    "$a$ $b$ $a$ = '{1}'::tools.evil[]::text or $b$ $b$ = ''",
    "/* /* */ ' */ '{1}'::tools.evil[] is not null",
    "'\\' = '{1}'::tools.evil[]::text",
    "e.topic = '''' or '{1}'::tools.evil[] is not null",
    "\"e\".topic = '\"' or '{1}'::tools.evil[] is not null or '\"' = ''",
    "1.tools = 1 or '{1}'::tools.evil[] is not null",
    "a$b$ = 1 or '{1}'::tools.evil[] is not null or $b$ $b$ = ''",
    "true) or '{1}'::tools.evil[] is not null or (true",
    "'{1}'::postgres.tools.evil[] is not null",
    "pg_catalog.tools.evil('{1}') is not null",
    "1 operator(tools.=) 1",
    "1 operator(e.=) 1",
    "e.payload operator(tools.->>) 'a' = ''",
]
"""Conditions that would run a function of the author while the server reads the text."""

WAYS = {
    "a queue": "select pgmb.create_queue('evil', condition => %s)",
    "a binding": "select pgmb.bind('mine', '{t}', condition => %s)",
    "a subscription": "select pgmb.subscribe('g', condition => %s)",
    "an endpoint": "select pgmb.create_endpoint('evil', 'https://example.org/', condition => %s)",
    "a binding of an endpoint": "select pgmb.bind_endpoint('hook', '{t}', condition => %s)",
}
GRANTS = "grant pgmb_admin, pgmb_conditions, pgmb_consumer, pgmb_publisher to {}"


@pytest.fixture(scope="module")
def author(target: Target) -> psycopg.Connection[Any]:
    author = target.role(
        "author", GRANTS, "create schema tools authorization {}", "create schema e authorization {}"
    )
    for statement in TYPES:
        author.execute(statement.encode())
    return author


def refused(author: psycopg.Connection[Any], condition: str, way: str = "a queue") -> psycopg.Error:
    with pytest.raises(psycopg.DatabaseError) as refusal, author.transaction():
        author.execute(WAYS[way].encode(), [condition])
    return refusal.value


@pytest.mark.parametrize("way", WAYS)
def test_a_condition_is_accepted(author: psycopg.Connection[Any], way: str) -> None:
    """On either installation: otherwise the attempts below would be refused for another reason."""
    with author.transaction(force_rollback=True):
        author.execute(WAYS[way].encode(), ["e.topic = 'a'"])


@pytest.mark.parametrize("condition", [*NO_CONDITIONS.values(), *MORE], ids=[*NO_CONDITIONS, *MORE])
def test_a_hostile_condition_is_refused(author: psycopg.Connection[Any], condition: str) -> None:
    error = refused(author, condition)
    assert error.sqlstate == "MB010", str(error)


@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_condition_is_refused_everywhere(author: psycopg.Connection[Any], way: str) -> None:
    error = refused(author, "query_to_xml('select 1', true, true, '') is null", way)
    assert error.sqlstate == "MB010", str(error)


@pytest.mark.parametrize("conforming", ["on", "off"])
@pytest.mark.parametrize("condition", OWN_CODE, ids=shortened)
def test_no_code_of_the_author_runs_while_a_condition_is_read(
    author: psycopg.Connection[Any], condition: str, conforming: str
) -> None:
    author.execute(f"set standard_conforming_strings = {conforming}")
    error = refused(author, condition)
    author.execute("reset standard_conforming_strings")
    assert error.sqlstate == "MB010", str(error)
    assert author.execute("select is_called from e.ran").fetchone() == (False,)


@pytest.fixture(scope="module")
def without_conditions(installations: Installations) -> Iterator[psycopg.Connection[Any]]:
    """An author where the owner of pgmb was not granted the roles that conditions run as."""
    with installations.copy(WITHOUT_CONDITIONS) as target:
        yield target.role("author", GRANTS)


@pytest.mark.parametrize("condition", ["e.topic = 'a'", "pg_sleep(1) is null"])
@pytest.mark.parametrize("way", WAYS)
def test_a_plain_owner_without_the_roles_has_no_conditions(
    without_conditions: psycopg.Connection[Any], way: str, condition: str
) -> None:
    error = refused(without_conditions, condition, way)
    assert error.sqlstate == "MB025", str(error)
    assert "grant both to the owner" in (error.diag.message_hint or "")
