"""What plain roles cannot do by way of filters and conditions.

A test for each attempt. The schema's owner is the tests' superuser: who ran as it could do anything.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import sql

from harness.states import paused_queues, queue_names
from tests.contract.cast import Cast
from tests.contract.secret import SECRET, hide
from tests.contract.test_privileges import refused, rows


@pytest.fixture(autouse=True)
def stage(db: psycopg.Connection[Any]) -> None:
    hide(db)


# Who may write conditions.


@pytest.mark.parametrize("groups", [["pgmb_consumer"], ["pgmb_admin"], ["pgmb_publisher", "pgmb_admin"]])
def test_a_condition_is_written_only_by_those_who_were_granted_it(
    db: psycopg.Connection[Any], cast: Cast, groups: list[str]
) -> None:
    plain = cast.acting(cast.role("plain", *groups))
    refused(plain, "select pgmb.subscribe('g', condition => 'true')")
    if "pgmb_admin" in groups:
        refused(plain, "select pgmb.create_queue('r', condition => 'true')")
        refused(plain, "select pgmb.bind('q', '{#}', condition => 'true')")
    author = cast.acting(cast.role("author", "pgmb_conditions", *groups))
    author.execute("select pgmb.subscribe('g', condition => 'true')")
    if "pgmb_admin" in groups:
        author.execute("select pgmb.create_queue('r', condition => 'true')")
        author.execute("select pgmb.bind('q', '{#}', condition => 'true')")
    # Nor is one that somebody else wrote theirs to use.
    refused(plain, "select pgmb.subscribe('h', condition => 'true')")


def test_being_granted_conditions_alone_gives_nothing(db: psycopg.Connection[Any], cast: Cast) -> None:
    author = cast.acting(cast.role("author", "pgmb_conditions"))
    for statement in (
        "select pgmb.subscribe('g', condition => 'true')",
        "select pgmb.create_queue('r', condition => 'true')",
        "select pgmb_internal.compile_condition('true')",
        "select pgmb_parser.parse('true')",
        "select * from pgmb.subscription",
    ):
        refused(author, statement)


def test_nobody_may_act_as_the_matcher(db: psycopg.Connection[Any], cast: Cast) -> None:
    every = cast.acting(
        cast.role("every", "pgmb_conditions", "pgmb_admin", "pgmb_consumer", "pgmb_publisher")
    )
    for statement in (
        "set role pgmb_matcher",
        "set role pgmb_parser",
        "select pgmb_parser.parse('true')",
        "select pgmb_internal.make_condition('true')",
        "select pgmb_condition.match('select 1', '{}', 'g', 1, null)",
        "create function pgmb_condition.more() returns int language sql as 'select 1'",
        "select * from pgmb.subscription",
        "select * from pgmb.condition",
    ):
        with pytest.raises(psycopg.Error) as refusal:
            every.execute(statement)
        assert refusal.value.sqlstate == "42501", (statement, str(refusal.value))


# What the matcher may do.


def test_the_matcher_has_no_rights_but_its_own(db: psycopg.Connection[Any], cast: Cast) -> None:
    db.execute("select pgmb.create_queue('r', condition => 'true')")
    assert rows(
        db,
        "select rolcanlogin, rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolreplication"
        " from pg_roles where rolname = 'pgmb_matcher'",
    ) == [(False,) * 6]
    assert rows(db, "select count(*) from pg_auth_members where member = 'pgmb_matcher'::regrole") == [(0,)]
    # Beyond what everybody has.
    relations = rows(
        db,
        "select c.oid::regclass::text, p.kind from pg_class c, unnest(array['select', 'insert', 'update',"
        " 'delete', 'truncate', 'references', 'trigger']) p (kind)"
        " where c.relkind in ('r', 'p', 'v', 'm', 'f')"
        " and c.relnamespace::regnamespace::text !~ '^(pg_|inform)'"
        " and has_table_privilege('pgmb_matcher', c.oid, p.kind)",
    )
    assert relations == [("pgmb.subscription", "select")]
    assert (
        rows(
            db,
            "select c.oid::regclass::text from pg_class c where case c.relkind when 'S' then"
            " has_sequence_privilege('pgmb_matcher', c.oid, 'usage, select, update') end",
        )
        == []
    )
    functions = rows(
        db,
        "select n.nspname || '.' || p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname !~ '^(pg_catalog|information_schema)$' and p.proname !~ '^c_'"
        " and has_function_privilege('pgmb_matcher', p.oid, 'execute') order by 1",
    )
    assert [name for (name,) in functions] == ["pgmb_condition.match"]
    schemas = rows(
        db,
        "select n.nspname::text, has_schema_privilege('pgmb_matcher', n.oid, 'create') from pg_namespace n"
        " where n.nspname !~ '^(pg_|information_schema|public$)|^pg_'"
        " and has_schema_privilege('pgmb_matcher', n.oid, 'usage') order by 1",
    )
    assert [one for one in schemas if one[0] != "pg_catalog"] == [("pgmb", False), ("pgmb_condition", True)]
    assert (
        rows(
            db,
            "select p.proname::text from pg_proc p where p.pronamespace = 'pgmb_condition'::regnamespace"
            " and not (p.prosecdef and p.proowner = 'pgmb_matcher'::regrole"
            " and 'search_path=pg_catalog, pg_temp' = any (p.proconfig)"
            " and 'standard_conforming_strings=on' = any (p.proconfig))",
        )
        == []
    )
    assert (
        rows(
            db,
            "select p.proname::text from pg_proc p,"
            " aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a"
            " where p.pronamespace = 'pgmb_condition'::regnamespace and a.grantee = 0",
        )
        == []
    )


# Attempts by one who may write conditions. Each would become the owner if code of its own ran as the matcher
# and stayed: the owner calls what the matcher owns.


@pytest.fixture
def author(db: psycopg.Connection[Any], cast: Cast) -> psycopg.Connection[Any]:
    role = cast.role("author", "pgmb_conditions", "pgmb_consumer", "pgmb_publisher", "pgmb_admin")
    db.execute(sql.SQL("create schema lair authorization {}").format(sql.Identifier(role)))
    acting = cast.acting(role)
    acting.execute("set statement_timeout = '60s'")
    acting.execute("grant usage on schema lair to public")
    acting.execute("create sequence lair.ran")
    acting.execute("grant usage on sequence lair.ran to public")
    acting.execute("create table lair.pg_depend (like pg_catalog.pg_depend)")
    acting.execute("grant select on lair.pg_depend to public")
    takeover = """
        create function lair.take() returns boolean language plpgsql volatile as $$
        begin
          perform nextval('lair.ran');
          perform set_config('search_path', 'lair, pg_catalog, pg_temp', true);
          perform set_config('search_path', 'lair, pg_catalog, pg_temp', false);
          execute 'create or replace function pgmb_condition.match(statement text,'
            ' documents pgmb.document[], group_id text, stream integer, subscriptions uuid[],'
            ' out seqs bigint[], out matching uuid[]) language plpgsql security invoker as ''begin'
            ' update public.secret set text = current_user; end''';
          return true;
        exception when insufficient_privilege then
          return true;
        end $$"""
    acting.execute(takeover)
    acting.execute(
        "create function lair.quiet(int) returns boolean language plpgsql immutable as"
        " $$begin return lair.take(); end$$"
    )
    acting.execute("create domain lair.evil as int check (lair.quiet(value))")
    acting.execute("create type lair.pair as (one lair.evil)")
    acting.execute("create view lair.peep as select lair.take() taken")
    acting.execute("grant select on lair.peep to public")
    acting.execute("create temporary table shadow (one lair.evil)")
    acting.execute("create domain pg_temp.near as int check (lair.quiet(value))")
    return acting


ATTEMPTS = [
    "lair.quiet(1)",
    "lair.take()",
    "1::lair.evil is not null",
    "'1'::lair.evil is not null",
    "'{1}'::lair.evil[] is not null",
    "'(1)'::lair.pair is not null",
    "'{1}'::near[] is not null",
    "'(1)'::shadow is not null",
    "'(1)'::pg_temp.shadow is not null",
    "array_in('{1}', 'lair.evil'::regtype::oid, -1) is not null",
    "array_in('{1}', {evil}, -1) is not null",
    "domain_in('1', {evil}, -1) is not null",
    "record_in('(1)', {pair}, -1) is not null",
    "table_to_xml((e.payload->>'t')::regclass, true, true, '') is not null",
    "table_to_xml(({peep}::oid)::regclass, true, true, '') is not null",
    "schema_to_xml('lair', true, true, '') is not null",
    "schema_to_xml((s.params->>'t')::name, true, true, '') is not null",
    "database_to_xml(true, true, '') is not null",
    "query_to_xml('select * from lair.peep', true, true, '') is not null",
    "pg_input_is_valid('1', 'lair.evil')",
    "pg_input_is_valid('{1}', 'lair.evil[]')",
    "json_value(e.payload, '$.n' returning lair.evil) is not null",
    "json_query(e.payload, '$.n' returning lair.pair) is not null",
    "json_value(e.payload, '$.n' returning int default 1::lair.evil on empty) is not null",
    "jsonb_populate_record(null::lair.pair, e.payload) is not null",
    "(e.payload->'n')::lair.evil is not null",
    "e.topic = ' \\' or lair.take() or true --'",
    "pg_notify('channel', 'message') is not null",
    "(select true from public.secret limit 1)",
]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_author_does_not_become_the_owner(
    db: psycopg.Connection[Any], author: psycopg.Connection[Any], attempt: str
) -> None:
    numbers = rows(
        db, "select 'lair.evil'::regtype::oid, 'lair.pair'::regtype::oid, 'lair.peep'::regclass::oid"
    )[0]
    for name, number in zip(("{evil}", "{pair}", "{peep}"), numbers, strict=True):
        attempt = attempt.replace(name, str(number))
    sources = (
        "select proname, prosrc, prosecdef, proowner from pg_proc"
        " where proname in ('match', 'parse') order by 1, 2"
    )
    before = rows(db, sources)
    db.execute("select pgmb.create_queue('g')")
    listener = db
    listener.execute("listen channel")
    for scope in ("on", "off"):
        author.execute(f"set standard_conforming_strings = {scope}")
        for statement in (
            "select pgmb.subscribe('g', condition => %s, params => '{\"t\": \"lair\"}')",
            "select pgmb.create_queue('mine', condition => %s, params => '{\"t\": \"lair\"}')",
        ):
            said = ""
            try:
                author.execute(statement, [attempt])
            except psycopg.DatabaseError as refusal:
                said = f"{refusal.sqlstate} {refusal}"
            assert said == "" or said.startswith("MB010"), said
            assert SECRET not in said
        author.execute('select pgmb.publish(\'t\', \'{"t": "lair.peep", "n": 1}\')')
        for reader in (author, db):
            reader.execute("select * from pgmb.receive_group('g')")
            if "mine" in queue_names(db):
                reader.execute("select * from pgmb.receive('mine')")
                reader.execute("select * from pgmb.pending_messages('mine')")
    assert rows(db, sources) == before
    assert rows(db, "select text from public.secret") == [(SECRET,)]
    assert list(listener.notifies(timeout=0)) == []
    assert rows(db, "select is_called from lair.ran") == [(False,)], "ran code of its own as another"


def test_a_changed_runner_is_not_run(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Should the matcher ever be taken over, the owner does not run what it left behind."""
    db.execute("select pgmb.create_queue('g')")
    db.execute("select pgmb.subscribe('g', condition => 'e.seq > 0')")
    db.execute("select pgmb.create_queue('r', condition => 'e.seq > 0')")
    db.execute("select pgmb.publish('t', '1')")
    db.execute(
        "create or replace function pgmb_condition.match(statement text, documents pgmb.document[],"
        " group_id text, stream integer, subscriptions uuid[], out seqs bigint[], out matching uuid[])"
        " language plpgsql as $$begin update public.secret set text = current_user; end$$"
    )
    (made,) = rows(
        db,
        "select proname::text from pg_proc where pronamespace = 'pgmb_condition'::regnamespace"
        " and proname like 'c\\_%%'",
    )
    db.execute(
        sql.SQL(
            "create function pgmb_condition.{}(pgmb.document, record) returns boolean language plpgsql"
            " as $$begin update public.secret set text = current_user; return true; end$$"
        ).format(sql.Identifier(made[0]))
    )
    assert rows(db, "select * from pgmb.receive_group('g')") == []
    assert rows(db, "select * from pgmb.receive('r')") == []
    assert "is not as it was made" in rows(db, "select paused_reason from pgmb.subscription")[0][0]
    assert "is not as it was made" in str(paused_queues(db)["r"])
    assert rows(db, "select text from public.secret") == [(SECRET,)]


# Attempts by those who may not.


def test_filters_and_fields_are_no_way_out(db: psycopg.Connection[Any], cast: Cast) -> None:
    consumer = cast.acting(cast.role("consumer", "pgmb_consumer"))
    consumer.execute("set statement_timeout = '60s'; set standard_conforming_strings = off")
    broken = [
        "x'",
        "x\\",
        "x\\' or true --",
        "$$",
        "') or exists(select from public.secret) --",
        "%L",
        "%1$s",
    ]
    for text in broken:
        fields = json.dumps(
            {"payload": {text: text}, "headers": {text: {text: 1}}, "topic": text, "key": text}
        )
        path = (
            "$.payload."
            + json.dumps(text)
            + " == "
            + json.dumps(text)
            + " || $.payload == $"
            + json.dumps(text)
        )
        for call in (
            "subscribe('q', array[%(text)s], %(fields)s, %(path)s, params => %(params)s)",
            "between_filtered('main', null, null, 0, 9, %(fields)s, %(path)s, %(params)s)",
        ):
            consumer.execute(
                f"select * from pgmb.{call}",
                {"text": text, "fields": fields, "path": path, "params": json.dumps({text: text})},
            )
        db.execute(
            "select pgmb.publish(%s, %s::json, key => %s, headers => %s::json)",
            [text, json.dumps({text: text}), text, json.dumps({text: {text: 1}})],
        )
    found = rows(consumer, "select topic, cardinality(subscriptions) from pgmb.receive_group('q')")
    assert found == [(text, 1) for text in broken]
    assert rows(db, "select count(*) from pgmb.subscription where paused_at is not null") == [(0,)]
    assert rows(db, "select text from public.secret") == [(SECRET,)]


def test_subscriptions_of_streams_that_one_may_not_read_are_out_of_reach(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    db.execute("select pgmb.create_stream('theirs')")
    (mine,) = rows(db, "select pgmb.subscribe('g', params => '{\"a\": 1}')")[0]
    (theirs,) = rows(db, "select pgmb.subscribe('g', stream => 'theirs')")[0]
    role = cast.role("reader")
    db.execute("select pgmb.grant_read('main', %s)", [role])
    reader = cast.acting(role)
    reader.execute("select pgmb.subscribe('g')")
    assert rows(reader, "select * from pgmb.keep_subscriptions(%s)", [mine]) == [(mine,)]
    refused(reader, "select pgmb.subscribe('g', stream => 'theirs')")
    refused(reader, "select pgmb.unsubscribe(%s)", theirs)
    refused(reader, "select * from pgmb.keep_subscriptions(%s)", [theirs])
    refused(reader, "select pgmb.resume_subscriptions('g')")
    refused(reader, "select * from pgmb.between_group('g', 'theirs', pgmb.earliest(), pgmb.position())")
    refused(reader, "select * from pgmb.receive_group('q')")
    refused(reader, "select * from pgmb.subscriptions")
