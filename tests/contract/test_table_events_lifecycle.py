"""Table events from beginning to end: flags, streams, renames, drops, dumps, and what cannot be watched."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import psycopg
import pytest

from harness.postgres import binaries, create_database, drop_database
from harness.server import Server
from pgmb import schema
from tests.conftest import Connect
from tests.contract.mutations import Mutation, mutations, watch


def triggers(db: psycopg.Connection[Any]) -> list[str]:
    return [
        row[0]
        for row in db.execute("select tgname from pg_trigger where tgname ~ '^pgmb_' order by 1").fetchall()
    ]


@pytest.fixture
def table(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("create table t (id int primary key, n int default 0)")
    return db


def all_four(db: psycopg.Connection[Any], table: str = "t") -> list[str]:
    """Which operations are published, by doing them all."""
    for statement in (
        "insert into {} values (1)",
        "update {} set n = n + 1",
        "delete from {}",
        "truncate {}",
    ):
        db.execute(statement.format(table))
    return [m.topic.rpartition(".")[2] for m in mutations(db)]


README = """
-- let's say we have a table "users"
CREATE TABLE users (
	id SERIAL PRIMARY KEY,
	created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
	name TEXT NOT NULL,
	email TEXT NOT NULL UNIQUE
);

-- to enable automatic events from mutations on this table,
-- we just need to call the following function:
SELECT pgmb.push_table_mutations('public.users'::regclass);

-- to disable certain mutation types, we can parameters for the same.
-- for example, to only enable "insert" events:
SELECT pgmb.push_table_mutations(
	'public.users'::regclass,
	delete := FALSE,
	update := FALSE
);
"""


def test_the_second_seeds_example_runs_as_it_stands(db: psycopg.Connection[Any]) -> None:
    db.execute(README)
    db.execute("insert into users (name, email) values ('a', 'a@x.org')")
    db.execute("update users set name = 'b'")
    db.execute("delete from users")
    (inserted,) = mutations(db)
    assert inserted.topic == "public.users.insert"
    assert (inserted.row["id"], inserted.row["name"], inserted.row["email"]) == (1, "a", "a@x.org")


def test_calling_again_changes_what_is_published(table: psycopg.Connection[Any]) -> None:
    table.execute("select pgmb.push_table_mutations('public.t'::regclass)")
    assert all_four(table) == ["insert", "update", "delete", "truncate"]
    table.execute("SELECT pgmb.push_table_mutations('public.t'::regclass, delete := FALSE, update := FALSE)")
    assert all_four(table) == ["insert", "truncate"]
    table.execute(
        "select pgmb.push_table_mutations('t'::regclass, insert => false, update => true, delete => true)"
    )
    assert all_four(table) == ["update", "delete", "truncate"]
    table.execute("select pgmb.push_table_mutations('t', false, false, false, true)")
    assert all_four(table) == ["truncate"]
    watch(table, "t", insert=False, update=False, delete=None, truncate=False)
    assert all_four(table) == []
    assert triggers(table) == []


def test_calling_again_with_the_same_does_nothing_and_locks_nothing(
    table: psycopg.Connection[Any], connect: Connect
) -> None:
    watch(table, "t", delete=False)
    before = table.execute("select oid, xmin from pg_trigger where tgname ~ '^pgmb_' order by oid").fetchall()
    writer = connect(autocommit=False)
    writer.execute("insert into t values (1)")
    table.execute("set lock_timeout = '5s'")
    watch(table, "t", delete=False)
    assert (
        before
        == table.execute("select oid, xmin from pg_trigger where tgname ~ '^pgmb_' order by oid").fetchall()
    )
    writer.rollback()


def test_stop_says_whether_there_was_anything_and_leaves_nothing(table: psycopg.Connection[Any]) -> None:
    everything = (
        "select 'trigger', tgname::text from pg_trigger union all select 'function', proname from pg_proc"
        " union all select 'class', relname from pg_class where relnamespace::regnamespace::text !~ '^pg_'"
        " union all select 'depend', count(*)::text from pg_depend order by 1, 2"
    )
    before = table.execute(everything).fetchall()
    assert table.execute("select pgmb.stop_table_mutations('t')").fetchone() == (False,)
    watch(table, "t")
    assert table.execute("select pgmb.stop_table_mutations('t')").fetchone() == (True,)
    assert table.execute("select pgmb.stop_table_mutations('t')").fetchone() == (False,)
    assert table.execute(everything).fetchall() == before
    assert all_four(table) == []


def test_other_triggers_stay(table: psycopg.Connection[Any]) -> None:
    table.execute(
        "create trigger pgmb_mine before update on t"
        " for each row execute function suppress_redundant_updates_trigger()"
    )
    watch(table, "t")
    table.execute("select pgmb.stop_table_mutations('t')")
    assert triggers(table) == ["pgmb_mine"]


def test_a_stream_of_its_own(table: psycopg.Connection[Any]) -> None:
    table.execute("select pgmb.create_stream('Changes.of-t')")
    watch(table, "t", stream="Changes.of-t")
    table.execute("insert into t values (1)")
    table.execute("insert into t select generate_series(2, 50)")
    table.execute("update t set n = 1 where id < 3")
    table.execute("update t set n = 2")
    table.execute("truncate t")
    assert mutations(table) == []
    assert len(mutations(table, "Changes.of-t")) == 50 + 2 + 50 + 1
    with pytest.raises(psycopg.DatabaseError) as caught:
        table.execute("select pgmb.drop_stream('Changes.of-t')")
    assert caught.value.sqlstate == "MB004"
    assert table.execute("select stream from pgmb.table_mutations()").fetchall() == [("Changes.of-t",)]
    watch(table, "t")
    table.execute("select pgmb.drop_stream('Changes.of-t')")
    assert all_four(table) == ["insert", "update", "delete", "truncate"]


def test_the_topic_follows_renames(table: psycopg.Connection[Any]) -> None:
    watch(table, "t")
    table.execute("insert into t values (1)")
    table.execute("alter table t rename to Renamed; alter table renamed rename id to number")
    table.execute("insert into renamed values (2)")
    table.execute("create schema elsewhere; alter table renamed set schema elsewhere")
    table.execute('alter schema elsewhere rename to "Moved On"')
    table.execute('insert into "Moved On".renamed values (3)')
    assert [m[:2] for m in mutations(table)] == [
        ("public.t.insert", "1"),
        ("public.renamed.insert", "2"),
        ("moved_on.renamed.insert", "3"),
    ]
    assert table.execute("select tabl::text, topic from pgmb.table_mutations()").fetchall() == [
        ('"Moved On".renamed', "moved_on.renamed")
    ]


def test_dropping_the_table_leaves_nothing(table: psycopg.Connection[Any]) -> None:
    watch(table, "t")
    table.execute("drop table t")
    assert triggers(table) == []
    assert table.execute("select * from pgmb.table_mutations()").fetchall() == []


def test_uninstalling_takes_the_triggers_and_leaves_the_table(table: psycopg.Connection[Any]) -> None:
    watch(table, "t")
    table.execute("insert into t values (1)")
    schema.uninstall(table)
    assert triggers(table) == []
    table.execute("insert into t values (2)")


def test_an_upgrade_keeps_what_is_watched(table: psycopg.Connection[Any]) -> None:
    watch(table, "t", delete=False)
    before = table.execute("select m::text from pgmb.table_mutations() m").fetchall()
    schema.install(table)
    assert table.execute("select m::text from pgmb.table_mutations() m").fetchall() == before
    assert all_four(table) == ["insert", "update", "truncate"]


def test_a_disabled_trigger_counts_as_none(table: psycopg.Connection[Any]) -> None:
    watch(table, "t")
    table.execute("alter table t disable trigger pgmb_update")
    assert table.execute("select insert, update, delete from pgmb.table_mutations()").fetchall() == [
        (True, False, True)
    ]
    watch(table, "t")
    assert all_four(table) == ["insert", "update", "delete", "truncate"]


@pytest.mark.once(15)
def test_dump_and_restore_keep_it(table: psycopg.Connection[Any], server: Server, pg_major: int) -> None:
    pg_dump = binaries(pg_major) / "pg_dump"
    if not pg_dump.exists():
        pytest.skip("the build of this version has no pg_dump")
    table.execute("select pgmb.create_stream('s')")
    watch(table, "t", stream="s", delete=False)
    table.execute("insert into t values (1)")
    name = create_database(server)
    try:
        dump = subprocess.run(
            [pg_dump, "-d", server.dsn(table.info.dbname)],
            capture_output=True,
            check=True,
            text=True,
        )
        subprocess.run(
            [binaries(pg_major) / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn(name)],
            input=dump.stdout,
            text=True,
            capture_output=True,
            check=True,
        )
        with psycopg.connect(server.dsn(name), autocommit=True) as restored:
            listed = restored.execute("select m::text from pgmb.table_mutations() m").fetchall()
            assert listed == [("(public.t,t,t,f,t,s,public.t)",)] or listed == [("(t,t,t,f,t,s,public.t)",)]
            # Loading the rows published nothing again.
            assert len(mutations(restored, "s")) == 1
            restored.execute("insert into t values (2)")
            assert [m.key for m in mutations(restored, "s")] == ["2"]
    finally:
        drop_database(server, name)


@pytest.mark.parametrize(
    "target",
    [
        "v",
        "mv",
        "ft",
        "temporary",
        "pgmb.log_main",
        "pgmb.queue",
        "pg_catalog.pg_class",
        "t_pkey",
        "seq",
        "parted",
    ],
)
def test_what_cannot_be_watched_is_refused(table: psycopg.Connection[Any], target: str) -> None:
    table.execute(
        "create view v as select 1; create materialized view mv as select 1; create sequence seq;"
        "create temp table temporary (id int); create foreign data wrapper nowhere; create server far"
        " foreign data wrapper nowhere; create foreign table ft (id int) server far;"
        "create table parted (id int) partition by list (id);"
        "create foreign table parted_1 partition of parted for values in (1) server far"
    )
    with pytest.raises(psycopg.DatabaseError) as caught:
        watch(table, target)
    assert caught.value.sqlstate == "MB005"
    assert caught.value.diag.message_hint


def test_nonsense_is_refused(table: psycopg.Connection[Any]) -> None:
    for statement, state in (
        ("select pgmb.push_table_mutations(null)", "MB005"),
        ("select pgmb.push_table_mutations(0)", "MB005"),
        ("select pgmb.push_table_mutations('nothing')", "42P01"),
        ("select pgmb.push_table_mutations('t', stream => 'nothing')", "MB001"),
        ("select pgmb.push_table_mutations('t', stream => null)", "MB001"),
        ("select pgmb.push_table_mutations('t', stream => '')", "MB001"),
    ):
        with pytest.raises(psycopg.DatabaseError) as caught:
            table.execute(statement)
        assert caught.value.sqlstate == state, statement
    assert table.execute("select pgmb.stop_table_mutations(null)").fetchone() == (False,)
    assert triggers(table) == []


def test_two_at_once(table: psycopg.Connection[Any], connect: Connect) -> None:
    """Both succeed, one after the other, while a third writes."""
    errors: list[BaseException] = []

    def run(connection: psycopg.Connection[Any], work: str) -> None:
        try:
            for _ in range(20):
                connection.execute(work)
        except BaseException as error:
            errors.append(error)

    work = [
        "select pgmb.push_table_mutations('t')",
        "select pgmb.push_table_mutations('t', delete => false)",
        "insert into t (id) select coalesce(max(id), 0) + 1 from t",
    ]
    threads = [threading.Thread(target=run, args=(connect(), each)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert errors == []
    watch(table, "t")
    assert triggers(table) == ["pgmb_delete", "pgmb_insert", "pgmb_truncate", "pgmb_update"]


def test_a_full_queue_refuses_the_write(table: psycopg.Connection[Any]) -> None:
    watch(table, "t")
    table.execute("select pgmb.create_queue('q', max_length => 2, when_full => 'refuse')")
    table.execute("insert into t values (1)")
    table.execute("insert into t values (2)")
    with pytest.raises(psycopg.DatabaseError) as caught:
        table.execute("insert into t values (3)")
    assert caught.value.sqlstate == "MB040"
    assert table.execute("select count(*) from t").fetchone() == (2,)
    assert mutations(table)[0] == Mutation("public.t.insert", "1", {"id": 1, "n": 0})
