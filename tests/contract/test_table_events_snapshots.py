"""Table events of transactions whose snapshot is older than the table: refused, not wrong and not unsafe."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.errors import SerializationFailure

from tests.conftest import Connect
from tests.contract.cast import Cast
from tests.contract.mutations import mutations, watch

CHANGES = {
    "a column is added": "alter table t add c int default 7",
    "a column is renamed": "alter table t rename n to m",
    "a column is dropped": "alter table t drop n",
    "a type is changed": "alter table t alter n type text",
    "the key is renamed": "alter table t rename id to number",
    "the key is dropped": "alter table t drop constraint t_pkey",
    "the key has another column": "alter table t drop constraint t_pkey, add primary key (n)",
    "a serialiser is replaced": """create or replace function pgmb.serialise_record_for_event(
          tabl oid, op text, record record, serialised out jsonb, emit out boolean)
        language plpgsql immutable as $$ begin serialised := to_jsonb(record) - 'n'; emit := true; end $$""",
}


@pytest.fixture(
    params=[IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE], ids=lambda one: one.name
)
def writer(
    request: pytest.FixtureRequest, db: psycopg.Connection[Any], connect: Connect
) -> psycopg.Connection[Any]:
    db.execute("create table t (id int primary key, n int)")
    db.execute("insert into t values (1, 1)")
    watch(db, "t")
    opened = connect(autocommit=False)
    opened.isolation_level = request.param
    opened.execute("select")
    return opened


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_table_that_changed_after_the_snapshot_is_written_in_the_next_transaction(
    db: psycopg.Connection[Any], writer: psycopg.Connection[Any], change: str
) -> None:
    db.execute(change.encode())
    with pytest.raises(SerializationFailure, match="changed after this transaction's snapshot"):
        writer.execute("insert into t values (5)" if "drop n" in change else "insert into t values (5, 5)")
    writer.rollback()
    writer.execute("delete from t")
    writer.commit()
    assert [m.topic for m in mutations(db)] == ["public.t.delete"]


def test_a_table_that_is_published_since_the_snapshot_is_written_in_the_next_transaction(
    db: psycopg.Connection[Any], writer: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.stop_table_mutations('t')")
    writer.rollback()
    writer.execute("select")
    watch(db, "t")
    with pytest.raises(SerializationFailure, match="changed after this transaction's snapshot"):
        writer.execute("insert into t values (5, 5)")


@pytest.mark.parametrize("rows", [1, 30])
def test_a_table_that_did_not_change_is_written_as_ever(
    db: psycopg.Connection[Any], writer: psycopg.Connection[Any], rows: int
) -> None:
    db.execute("create table other (id int)")
    writer.execute("insert into t select n + 100, n from generate_series(1, %s) n", [rows])
    writer.execute("update t set n = n + 1 where id > 100")
    writer.execute("delete from t where id > 100")
    writer.execute("delete from t where id > 100")
    writer.commit()
    assert len(mutations(db)) == 3 * rows
    writer.execute("truncate t")
    writer.commit()
    assert mutations(db)[-1].topic.endswith(".truncate")


def test_a_type_that_the_snapshot_does_not_show_calls_no_function_of_its_owner(
    db: psycopg.Connection[Any], writer: psycopg.Connection[Any], cast: Cast
) -> None:
    stranger = cast.role("stranger")
    db.execute("create table told (superuser boolean)")
    db.execute("create type mood as enum ('calm')")
    db.execute(
        "create function betray(mood) returns json language plpgsql as"
        " $$ begin insert into told values (true); return '1'; end $$"
    )
    db.execute("create cast (mood as json) with function betray(mood)")
    db.execute(f"alter type mood owner to {stranger}; alter table t add c mood".encode())
    with pytest.raises(SerializationFailure):
        writer.execute("insert into t values (2, 2, 'calm')")
    writer.rollback()
    assert db.execute("select from told").fetchall() == []
