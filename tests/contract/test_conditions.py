"""SQL conditions: what is one, what is refused, and that what was checked is what runs, for whoever reads."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json, Jsonb

from harness.states import paused_queues
from tests.conftest import Connect


@pytest.fixture
def db(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("set statement_timeout = '60s'")
    return db


def compiled(db: psycopg.Connection[Any], condition: str) -> str:
    row = db.execute("select pgmb_internal.compile_condition(%s)", [condition]).fetchone()
    assert row is not None
    return str(row[0])


def passes(
    reader: psycopg.Connection[Any], condition: str, payload: Any, params: Any = None, topic: str = "t"
) -> bool:
    """Whether an event gets through a queue with that condition."""
    reader.execute(
        "select pgmb.create_queue('asked', condition => %s, params => %s)", [condition, Jsonb(params or {})]
    )
    try:
        reader.execute("select pgmb.publish(%s, %s)", [topic, Json(payload)])
        got = reader.execute("select count(*) from pgmb.receive('asked')").fetchall()
        assert "asked" not in paused_queues(reader)
        return got == [(1,)]
    finally:
        reader.execute("select pgmb.drop_queue('asked')")


# What the README of @haathie/pgmb asks, and what its users are likely to.
ACCEPTED: list[tuple[str, Any, Any, bool]] = [
    ("s.params @> jsonb_build_object('topics', ARRAY[e.topic])", {}, {"topics": ["t", "u"]}, True),
    ("s.params @> jsonb_build_object('topics', ARRAY[e.topic])", {}, {"topics": ["u"]}, False),
    (
        "s.params @> jsonb_build_object('topics', ARRAY[e.topic], 'partition', abs(hashtext(e.id)) % 1)",
        {},
        {"topics": ["t"], "partition": 0},
        True,
    ),
    ("s.params @> jsonb_build_object('id', e.metadata->'old'->>'id') is not null", {}, {"id": 1}, True),
    ("e.payload->>'status' = 'paid' and (e.payload->>'n')::int > 3", {"status": "paid", "n": 4}, {}, True),
    ("e.topic like 't%' or e.key is not null", {}, {}, True),
    ("e.topic ~ '^\\w$' and e.topic similar to '(t|u)'", {}, {}, True),
    ("(e.payload->>'at')::timestamptz < e.published_at", {"at": "2020-01-01T00:00:00Z"}, {}, True),
    ("e.published_at > now() - interval '1 hour'", {}, {}, True),
    ("e.payload -> 'tags' ?| array['a', 'b']", {"tags": ["b"]}, {}, True),
    ("e.payload @@ '$.n > 3'", {"n": 4}, {}, True),
    ("coalesce(e.payload->>'n', 'x')::int > 3", {"n": 4}, {}, True),
    ("to_tsvector('english', e.payload->>'text') @@ plainto_tsquery('english', s.params->>'q')",
     {"text": "the cats"}, {"q": "cat"}, True),
    ("e.event -> 'payload' = e.payload and e.seq > 0 and length(e.id) = 36", {}, {}, True),
    ("-- the paid ones\n e.payload->>'status' /* as text */ = 'paid'", {"status": "paid"}, {}, True),
    ("case when e.payload ? 'n' then (e.payload->>'n')::numeric between 1 and 2 end", {"n": 1.5}, {}, True),
    ("num_nonnulls(e.key, e.payload) = 1 and greatest(1, 2) = 2", {}, {}, True),
    ("row(1, e.topic) < row(2, 'a') and e.topic in ('t', 'u') and e.key is null", {}, {}, True),
    ("e is not null or true", {}, {}, True),
    ("e.payload->>'n' = ''''", {"n": "'"}, {}, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "payload", "params", "expected"), ACCEPTED, ids=[one[0][:40] for one in ACCEPTED]
)
def test_these_are_conditions(
    db: psycopg.Connection[Any], condition: str, payload: Any, params: Any, expected: bool
) -> None:
    assert passes(db, condition, payload, params) is expected
    # As the server writes it, it means the same, and is the same condition.
    written = compiled(db, condition)
    assert compiled(db, written) == written


REFUSED = {
    "no text": "",
    "blank": " \n ",
    "no boolean": "1",
    "text": "e.topic",
    "null": "null",
    "too long": "e.topic = '" + "x" * 4000 + "'",
    "a second statement": "true; select 1",
    "a second statement that hides": "true); drop table pgmb.queue; select (true",
    "a comment that hides the end": "true) --",
    "an open comment": "true /*",
    "an open quote": "e.topic = 'a",
    "an open dollar quote": "e.topic = $a$a",
    "too many brackets": "(true))",
    "too few": "((true)",
    "another clause": "true) then 1 end from pgmb.subscription union all select case when (true",
    "a parameter": "$1 is null",
    "another table's alias": "x.topic = 'a'",
    "a field that is not there": "e.nothing = 1",
    "a subquery": "exists (select 1)",
    "a subquery of a table": "(select true from pgmb.subscription limit 1)",
    "an array of a subquery": "array(select 1) is not null",
    "in a subquery": "1 in (select 1)",
    "an aggregate": "count(*) > 0",
    "a window": "rank() over () = 1",
    "a set": "generate_series(1, 2) = 1",
    "a set of json": "jsonb_array_elements(e.payload) = '1'",
    "random": "random() > 0.5",
    "the clock": "clock_timestamp() > now()",
    "nextval": "nextval('pgmb.seq_main') > 0",
    "currval": "lastval() > 0",
    "set_config": "set_config('a.b', 'c', false) = 'c'",
    "current_setting": "current_setting('a.b', true) is null",
    "notify": "pg_notify('a', 'b') is null",
    "sleep": "pg_sleep(1) is null",
    "an advisory lock": "pg_advisory_lock(1) is null",
    "an xid": "pg_current_xact_id() is not null",
    "an older xid": "txid_current() > 0",
    "a large object": "lo_get(1) is null",
    "a new large object": "lo_create(0) > 0",
    "a file": "pg_read_file('postgresql.conf') is null",
    "a query as text": "query_to_xml('select 1', true, true, '') is null",
    "a table by name": "table_to_xml((e.payload->>'t')::regclass, true, true, '') is null",
    "a table by constant": "table_to_xml('pgmb.subscription', true, true, '') is null",
    "a schema by name": "schema_to_xml('pgmb', true, true, '') is null",
    "everything": "database_to_xml(true, true, '') is null",
    "a schema's columns": "schema_to_xmlschema('pgmb', true, true, '') is null",
    "whether a table is there": "to_regclass('pgmb.queue') is not null",
    "a right": "has_table_privilege('pgmb.queue', 'select')",
    "a role": "pg_has_role('pgmb_admin', 'usage')",
    "a definition": "pg_get_viewdef('pgmb.queue_status'::regclass) is null",
    "a size": "pg_relation_size('pgmb.queue') > 0",
    "another session's death": "pg_terminate_backend(1)",
    "the log's switch": "pg_switch_wal() is null",
    "a type's reader by number": "array_in('{1}', 23, -1) is not null",
    "a domain's reader by number": "domain_in('1', 23, -1) is not null",
    "a row's reader by number": "record_in('(1)', 2249, -1) is not null",
    "a validator": "fmgr_sql_validator(1) is null",
    "an object's number": "'1'::oid = 1::oid",
    "a function of ours": "pgmb.matches('a', e.topic)",
    "a definer function of ours": "pgmb.position('main') is not null",
    "a table of ours": "e.topic = (pgmb.queue).name",
    "our own runner": "pgmb_condition.match('select 1', null, null, 1, null) is not null",
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_these_are_none(module_db: psycopg.Connection[Any], why: str) -> None:
    module_db.execute("set statement_timeout = '60s'")
    with pytest.raises(psycopg.Error) as refusal:
        compiled(module_db, REFUSED[why])
    assert refusal.value.sqlstate == "MB010", str(refusal.value)
    assert (
        module_db.execute(
            "select proname from pg_proc where pronamespace = 'pgmb_condition'::regnamespace"
            " and proname !~ '^(compile|match|forget)$'"
        ).fetchall()
        == []
    )


@pytest.mark.parametrize(
    "condition",
    [
        "pg_input_is_valid('1', 'public.evil')",
        "json_value(e.payload, '$.n' returning public.evil) is not null",
        "json_query(e.payload, '$.n' returning public.evil[]) is not null",
        "json_exists(e.payload, '$.n' passing 1::public.evil as x)",
        "json_value(e.payload, '$.n' returning int default 1::public.evil on empty) is not null",
        "merge_action() is null",
        "json_arrayagg(1) is not null",
    ],
)
def test_nor_are_those_that_newer_servers_could_run(
    db: psycopg.Connection[Any], pg_major: int, condition: str
) -> None:
    db.execute("create domain public.evil as int")
    with pytest.raises(psycopg.Error) as refusal:
        compiled(db, condition)
    assert refusal.value.sqlstate == "MB010"


USERS_OWN = {
    "a function": "public.trick(1)",
    "a function in its schema, unqualified": "trick(1)",
    "a function with a built-in's name": "public.upper(e.topic) = 'T'",
    "an operator": "e.topic operator(public.===) 'a'",
    "a domain": "(1::public.evil) is not null",
    "a literal of a domain": "'1'::public.evil is not null",
    "an array of a domain": "'{1}'::public.evil[] is not null",
    "a row with a domain": "'(1)'::public.pair is not null",
    "a range": "'[1,2)'::public.span is not null",
    "an enumeration": "e.topic = 'x'::public.mood::text",
    "a cast": "(e.topic::public.mood)::public.pair is not null",
    "a collation": 'e.topic collate public.mine = \'a\'',
    "a table's row": "(null::public.things) is null",
    "a table's array": "'{}'::public.things[] is not null",
}  # fmt: skip


@pytest.mark.parametrize("why", USERS_OWN)
def test_nothing_of_a_users_own_is_used(db: psycopg.Connection[Any], why: str) -> None:
    for statement in (
        "create function public.trick(int) returns boolean immutable language sql as 'select true'",
        "create function public.upper(text) returns text immutable language sql as $$select 'T'$$",
        "create function public.same(text, text) returns boolean immutable language sql as 'select true'",
        "create operator public.=== (leftarg = text, rightarg = text, function = public.same)",
        "create domain public.evil as int check (public.trick(value))",
        "create type public.pair as (one public.evil)",
        "create type public.span as range (subtype = int)",
        "create type public.mood as enum ('x')",
        "create function public.paired(public.mood) returns public.pair language sql as 'select row(1)'",
        "create cast (public.mood as public.pair) with function public.paired(public.mood)",
        "create collation public.mine (provider = icu, locale = 'und')",
        "create table public.things (id public.evil)",
    ):
        db.execute(statement)
    with pytest.raises(psycopg.Error) as refusal:
        compiled(db, USERS_OWN[why])
    assert refusal.value.sqlstate == "MB010", str(refusal.value)


@pytest.mark.parametrize("setting", ["pg_temp, public, pg_catalog", "public, pg_catalog", "pg_catalog"])
def test_shadows_in_the_writers_path_are_not_met(db: psycopg.Connection[Any], setting: str) -> None:
    for schema in ("pg_temp", "public"):
        db.execute(
            f"create function {schema}.jsonb_build_object(text, text[]) returns jsonb immutable"
            " language plpgsql as $$begin raise exception 'shadow'; end$$"
        )
    db.execute("create temporary table e (topic text); create temporary table s (params jsonb)")
    db.execute("create type pg_temp.document as (topic text)")
    db.execute("select set_config('search_path', %s, false)", [setting])
    condition = "s.params @> jsonb_build_object('topics', ARRAY[e.topic])"
    assert passes(db, condition, {}, {"topics": ["t"]})
    assert passes(db, "e.topic = 't' and s.params is not null", {})


def test_backslashes_mean_the_same_to_every_reader(db: psycopg.Connection[Any], connect: Connect) -> None:
    """One that reads them as escapes would end literals elsewhere, and run what is in them."""
    condition = r"e.topic <> '\' and e.key is distinct from ' or pg_notify($$a$$, $$b$$) is null -- '"
    digits = r"e.payload->>'n' ~ '^\d+$'"
    db.execute("select pgmb.create_queue('one', condition => %s)", [condition])
    db.execute("select pgmb.create_queue('two', condition => %s)", [digits])
    db.execute("select pgmb.create_queue('group')")
    db.execute("select pgmb.subscribe('group', condition => %s)", [condition])
    db.execute("select pgmb.subscribe('group', condition => %s)", [digits])
    reader = connect()
    reader.execute("set standard_conforming_strings = off; set statement_timeout = '60s'")
    db.execute("select pgmb.publish('t', '{\"n\": 12}')")
    db.execute("select pgmb.publish('t', '{\"n\": \"d\"}')")
    for queue, expected in (("one", 2), ("two", 1)):
        assert reader.execute("select count(*) from pgmb.receive(%s)", [queue]).fetchall() == [(expected,)]
    assert reader.execute(
        "select cardinality(subscriptions) from pgmb.receive_group('group')"
    ).fetchall() == [(2,), (1,)]


def test_dates_mean_the_same_to_every_writer_and_reader(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    conditions = [
        "(e.payload->>'day')::date = '2020-02-01'::date",
        "(e.payload->>'at')::timestamptz = '2020-02-01 12:00:00'::timestamptz",
        "e.payload->>'day' = ('2020-02-01'::date)::text",
        "interval '1 day -02:00:00' > interval '1 day' - interval '3 hours'",
        "0.1::float8 + 0.2::float8 <> 0.3::float8",
    ]
    settings = [
        "set datestyle = 'SQL, DMY'; set timezone = 'Asia/Tokyo'; set intervalstyle = 'sql_standard'",
        "set datestyle = 'German'; set timezone = 'America/New_York'; set extra_float_digits = -15",
        "set datestyle = 'ISO, MDY'; set quote_all_identifiers = on; set bytea_output = 'escape'",
    ]
    written: set[str] = set()
    for number, setting in enumerate(settings):
        writer = connect()
        writer.execute("set statement_timeout = '60s'")
        writer.execute(setting)
        for place, condition in enumerate(conditions):
            written.add(compiled(writer, condition))
            writer.execute("select pgmb.create_queue(%s, condition => %s)", [f"{place} {number}", condition])
    assert len(written) == len(conditions)
    db.execute('select pgmb.publish(\'t\', \'{"day": "2020-02-01", "at": "2020-02-01T12:00:00+00:00"}\')')
    for number, setting in enumerate(settings):
        reader = connect()
        reader.execute("set statement_timeout = '60s'")
        reader.execute(setting)
        for place, _ in enumerate(conditions):
            name = f"{place} {(number + 1) % len(settings)}"
            assert len(reader.execute("select seq from pgmb.receive(%s)", [name]).fetchall()) == 1, name


def test_deep_ones_are_refused_and_break_nothing(db: psycopg.Connection[Any]) -> None:
    assert passes(db, " and ".join(["e.topic = 't'"] * 200), {})
    assert passes(db, "(" * 1500 + "true" + ")" * 1500, {})
    with pytest.raises(psycopg.Error):
        compiled(db, "not " * 990 + "e.topic")
    assert passes(db, "not " * 900 + "true", {})


def test_the_same_condition_is_written_by_many_at_once(db: psycopg.Connection[Any], connect: Connect) -> None:
    failures: list[BaseException] = []
    ready = threading.Barrier(6)

    def subscribe(conn: psycopg.Connection[Any], spaces: int) -> None:
        try:
            ready.wait(60)
            for number in range(8):
                conn.execute(
                    "select pgmb.subscribe('g', condition => %s)", [f"e.seq {' ' * spaces}> {number}"]
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=subscribe, args=(connect(), spaces % 3)) for spaces in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert db.execute("select count(*) from pgmb.subscription").fetchall() == [(8,)]
    assert db.execute("select count(*) from pgmb.shape").fetchall() == [(8,)]


def test_those_that_nobody_asks_are_forgotten(db: psycopg.Connection[Any], connect: Connect) -> None:
    made = (
        "select count(*) from pg_proc"
        " where pronamespace = 'pgmb_condition'::regnamespace and proname like 'c\\_%'"
    )
    db.execute("select pgmb.create_queue('q', condition => 'e.seq > 0')")
    db.execute("select pgmb.subscribe('g', condition => 'e.seq > 0')")
    (given,) = db.execute("select pgmb.subscribe('g', condition => 'e.seq > 1')").fetchone() or (None,)
    db.execute("select pgmb.create_queue('gone', condition => 'e.seq > 0 and 2 = 2')")
    assert db.execute(made).fetchall() == [(3,)]
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select count(*) from pgmb.condition")
    db.execute("select pgmb.unsubscribe(%s)", [given])
    db.execute("select pgmb.drop_queue('gone')")
    db.execute("select pgmb.maintain()")
    assert db.execute(made).fetchall() == [(1,)]
    db.execute("select pgmb.publish('t', '1')")
    assert db.execute("select count(*) from pgmb.receive('q')").fetchall() == [(1,)]
    # One that still sees the forgotten condition makes it anew.
    old.execute("select pgmb.subscribe('again', condition => 'e.seq > 0 and 2 = 2')")
    old.commit()
    db.execute("select pgmb.create_queue('again')")
    db.execute("select pgmb.publish('t', '1')")
    assert db.execute("select count(*) from pgmb.receive_group('again')").fetchall() == [(1,)]


def test_events_that_jsonb_cannot_hold_still_have_a_topic(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', condition => $$e.topic = 't' and e.payload is null$$)")
    db.execute("select pgmb.create_queue('h', condition => $$e.headers->>'a' = 'b'$$)")
    for payload in (r'"\u0000"', "1e400000", '"' + "x" * 2**20 + '"', r'"\ud800"', r'{"a": "\u0000"}'):
        db.execute("select pgmb.publish('t', %s, headers => '{\"a\": \"b\"}')", [payload])
    db.execute("select pgmb.publish('t', '1')")
    assert db.execute("select count(*) from pgmb.receive('q')").fetchall() == [(5,)]
    assert db.execute("select count(*) from pgmb.receive('h')").fetchall() == [(5,)]


def test_a_condition_is_read_only_under_a_timeout(db: psycopg.Connection[Any], connect: Connect) -> None:
    db.execute("select pgmb.create_queue('q', condition => 'true')")
    db.execute("select pgmb.create_queue('group')")
    db.execute("select pgmb.subscribe('group', condition => 'true')")
    db.execute("select pgmb.publish('t', '1')")
    plain = connect()
    for statement in (
        "select * from pgmb.receive('q')",
        "select * from pgmb.receive_group('group')",
        "select * from pgmb.between_group('group', 'main', pgmb.earliest(), pgmb.position())",
        "select * from pgmb.pending_messages('q')",
    ):
        with pytest.raises(psycopg.Error) as refusal:
            plain.execute(statement)
        assert refusal.value.sqlstate == "MB024"
        assert len(db.execute(statement).fetchall()) == 1
