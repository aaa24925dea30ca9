"""Table events of tables that are not plain: partitioned, inherited, with odd columns or names."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.contract.mutations import Mutation, mutations, watch

SIZES = pytest.mark.parametrize("size", [4, 60])


@pytest.fixture
def parts(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """t is partitioned by part; the columns of t_b stand in another order."""
    db.execute(
        "create table t (id int, part text, n int default 0, primary key (id, part))"
        " partition by list (part);"
        "create table t_a partition of t for values in ('a');"
        "create table t_b (gone int, n int default 0, part text not null, id int not null);"
        "alter table t_b drop column gone;"
        "alter table t attach partition t_b for values in ('b')"
    )
    watch(db, "t")
    return db


def fill(db: psycopg.Connection[Any], size: int) -> None:
    db.execute(
        f"insert into t select n, case n % 2 when 1 then 'a' else 'b' end from generate_series(1, {size}) n"
    )


def row(number: int, part: str, n: int = 0) -> dict[str, Any]:
    return {"id": number, "part": part, "n": n}


@SIZES
def test_a_partitioned_table_publishes_as_one(parts: psycopg.Connection[Any], size: int) -> None:
    fill(parts, size)
    assert mutations(parts) == [
        Mutation("public.t.insert", f'[{n}, "{"ba"[n % 2]}"]', row(n, "ba"[n % 2]))
        for n in range(1, size + 1)
    ]
    parts.execute("update t set n = id")
    found = sorted(mutations(parts), key=lambda m: m.row["id"])
    assert [(m.topic, m.row, m.old, m.changed) for m in found] == [
        ("public.t.update", row(n, "ba"[n % 2], n), row(n, "ba"[n % 2]), {"n": n}) for n in range(1, size + 1)
    ]
    parts.execute("delete from t")
    assert sorted(m.row["id"] for m in mutations(parts)) == list(range(1, size + 1))
    parts.execute("truncate t")
    assert mutations(parts) == [Mutation("public.t.truncate", None, None)]


@SIZES
def test_rows_that_move_to_another_partition_are_updates(parts: psycopg.Connection[Any], size: int) -> None:
    fill(parts, size)
    mutations(parts)
    parts.execute("update t set part = translate(part, 'ab', 'ba'), n = id where id <> 2")
    found = sorted(mutations(parts), key=lambda m: m.row["id"])
    assert [(m.topic, m.row, m.old) for m in found] == [
        ("public.t.update", row(n, "ab"[n % 2], n), row(n, "ba"[n % 2])) for n in range(1, size + 1) if n != 2
    ]


@SIZES
def test_rows_that_are_stopped_on_their_way_to_another_partition(
    parts: psycopg.Connection[Any], size: int
) -> None:
    """The old rows are then more than the new ones, and nothing tells which belong together."""
    parts.execute(
        "create function stop() returns trigger language plpgsql as $$ begin"
        " if new.id = 3 then return null; end if; return new; end $$;"
        "create trigger stop before insert on t_b for each row execute function stop()"
    )
    fill(parts, size)
    mutations(parts)
    parts.execute("update t set part = 'b', n = 1")
    found = mutations(parts)
    assert {m.topic for m in found} == {"public.t.delete", "public.t.insert"}
    gone = sorted(m.row["id"] for m in found if m.topic == "public.t.delete")
    come = sorted(m.row["id"] for m in found if m.topic == "public.t.insert")
    assert gone == list(range(1, size + 1))
    assert come == [n for n in gone if n != 3]


def test_a_partition_named_in_a_statement_publishes_for_itself(parts: psycopg.Connection[Any]) -> None:
    parts.execute("insert into t_a values (1, 'a')")
    assert mutations(parts) == []
    watch(parts, "t_a")
    watch(parts, "t_b")
    parts.execute("insert into t_a values (3, 'a')")
    parts.execute("insert into t values (5, 'a')")
    parts.execute("truncate t_b")
    assert mutations(parts) == [
        Mutation("public.t_a.insert", '[3, "a"]', row(3, "a")),
        Mutation("public.t.insert", '[5, "a"]', row(5, "a")),
        Mutation("public.t_b.truncate", None, None),
    ]


def test_a_partition_that_came_later_needs_nothing(parts: psycopg.Connection[Any]) -> None:
    parts.execute("create table t_c partition of t for values in ('c')")
    parts.execute("insert into t values (1, 'c')")
    assert [m.topic for m in mutations(parts)] == ["public.t.insert"]
    parts.execute("alter table t detach partition t_c")
    parts.execute("update t_c set n = 5")
    assert mutations(parts) == []


@SIZES
def test_children_publish_through_their_parent(db: psycopg.Connection[Any], size: int) -> None:
    db.execute(
        "create table parent (id int primary key, n int);create table child (extra text) inherits (parent);"
    )
    watch(db, "parent")
    db.execute(f"insert into child select g, 0, 'x' from generate_series(1, {size}) g")
    assert mutations(db) == []
    db.execute("update parent set n = id")
    found = sorted(mutations(db), key=lambda m: m.row["id"])
    assert [(m.row, m.old) for m in found] == [
        ({"id": n, "n": n}, {"id": n, "n": 0}) for n in range(1, size + 1)
    ]


@SIZES
def test_generated_dropped_and_added_columns(db: psycopg.Connection[Any], size: int) -> None:
    db.execute(
        "create table t (id int primary key, gone text, n int, twice int generated always as (n * 2) stored)"
    )
    watch(db, "t")
    db.execute(f"insert into t select g, 'x', g from generate_series(1, {size}) g")
    assert mutations(db)[0].row == {"id": 1, "gone": "x", "n": 1, "twice": 2}
    db.execute("alter table t drop gone, add later text default 'y'")
    db.execute("update t set n = n + 1")
    first = min(mutations(db), key=lambda m: m.row["id"])
    assert first.row == {"id": 1, "n": 2, "twice": 4, "later": "y"}
    assert first.changed == {"n": 2, "twice": 4}
    db.execute("alter table t alter id type bigint, alter later type varchar, drop constraint t_pkey")
    db.execute("delete from t")
    assert {m.key for m in mutations(db)} == {None}


@pytest.mark.once(18)
@SIZES
def test_virtual_columns_have_their_values(db: psycopg.Connection[Any], size: int, pg_major: int) -> None:
    if pg_major < 18:
        pytest.skip("PostgreSQL 18 brought them")
    db.execute(
        'create table t (id int primary key, n int, "odd%" int generated always as (n % 2) virtual, z int)'
    )
    watch(db, "t")
    db.execute(f"insert into t (id, n, z) select g, g, 7 from generate_series(1, {size}) g")
    assert [m.row for m in mutations(db)] == [
        {"id": n, "n": n, "odd%": n % 2, "z": 7} for n in range(1, size + 1)
    ]
    db.execute("update t set n = 2")
    found = sorted(mutations(db), key=lambda m: m.row["id"])
    assert found[0].changed == {"n": 2, "odd%": 0}
    assert [m.row["id"] for m in found[:3]] == [1, 3, 4]
    assert found[2].changed == {"n": 2}
    db.execute("delete from t where id = 1")
    assert mutations(db)[0].row["odd%"] == 0


@pytest.mark.slow
def test_very_wide_rows_and_large_values(db: psycopg.Connection[Any]) -> None:
    columns = ", ".join(f"c{n} int" for n in range(1000))
    db.execute(f"create table t (id int primary key, big text, {columns})")
    watch(db, "t")
    db.execute(
        "insert into t (id, big, c999)"
        " select g, repeat('x', case g when 30 then 3000000 else 100000 end), 1 from generate_series(1, 30) g"
    )
    db.execute("update t set c999 = 2")
    found = mutations(db)
    assert len(found) == 60
    assert all(m.changed == {"c999": 2} for m in found[30:])
    assert len(found[59].row["big"]) == 3_000_000


def test_a_table_without_columns(db: psycopg.Connection[Any]) -> None:
    db.execute("create table t ()")
    watch(db, "t")
    db.execute("insert into t default values")
    db.execute("insert into t select from generate_series(1, 30)")
    db.execute("delete from t")
    found = mutations(db)
    assert len(found) == 62
    assert {(m.key, str(m.row)) for m in found} == {(None, "{}")}


@pytest.mark.parametrize(
    ("schema", "table", "topic"),
    [
        ("Sales", "OrderLines", "sales.orderlines"),
        ("a.b", "c.d", "a_b.c_d"),
        ("s", "with space\tand\nlines", "s.with_space_and_lines"),
        ("s", "#all*", "s._all_"),
        ("s", "größe_ÄÖ-1$", "s.größe_ÄÖ-1$"),
        ("s", "quo\"te's%I", "s.quo\"te's%i"),
    ],
)
def test_names_give_topics_of_three_words(
    db: psycopg.Connection[Any], schema: str, table: str, topic: str
) -> None:
    quoted = sql.Identifier(schema, table).as_string()
    db.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
    db.execute(f"create table {quoted} (id int)")
    watch(db, quoted)
    db.execute(f"insert into {quoted} values (1)")
    db.execute(f"insert into {quoted} select generate_series(1, 30)")
    assert {m.topic for m in mutations(db)} == {f"{topic}.insert"}
    assert db.execute("select topic from pgmb.table_mutations()").fetchall() == [(topic,)]
    db.execute("select pgmb.stop_table_mutations(%s)", [quoted])
    assert db.execute("select count(*) from pgmb.table_mutations()").fetchone() == (0,)
