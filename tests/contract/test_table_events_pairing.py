"""Table events: the old and the new row of an update belong together, whatever became of the key."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from tests.contract.mutations import mutations, watch

SIZES = pytest.mark.parametrize("size", [5, 50])


def fill(db: psycopg.Connection[Any], size: int, key: str) -> None:
    """Every row knows for ever which it is."""
    db.execute(f"create table t (id int {key}, mark int, n int default 0)")
    watch(db, "t", insert=False)
    db.execute("insert into t select n, n from generate_series(1, %s) n", [size])


def paired(db: psycopg.Connection[Any], size: int) -> list[tuple[int, int]]:
    """From which id to which, by mark."""
    found = sorted(mutations(db), key=lambda m: m.row["mark"])
    assert [m.row["mark"] for m in found] == list(range(1, size + 1))
    for mutation in found:
        assert mutation.old["mark"] == mutation.row["mark"]
        assert mutation.changed == {k: v for k, v in mutation.row.items() if mutation.old[k] != v}
    return [(m.old["id"], m.row["id"]) for m in found]


@SIZES
@pytest.mark.parametrize("key", ["primary key deferrable", "primary key deferrable initially deferred", ""])
def test_keys_that_are_swapped_and_turned_round(db: psycopg.Connection[Any], size: int, key: str) -> None:
    fill(db, size, key)
    db.execute("update t set id = %s - id, n = n + 1", [size + 1])
    assert paired(db, size) == [(n, size + 1 - n) for n in range(1, size + 1)]
    db.execute("update t set id = id %% %s + 1", [size])
    assert paired(db, size) == [(size + 1 - n, (size + 1 - n) % size + 1) for n in range(1, size + 1)]


@SIZES
def test_keys_that_move_on_to_the_next(db: psycopg.Connection[Any], size: int) -> None:
    """Each row takes the key that another one has just left."""
    fill(db, size, "primary key")
    db.execute("create table descending as select * from t order by id desc")
    db.execute("truncate t; insert into t select * from descending")
    mutations(db)
    db.execute("update t set id = id + 1")
    assert paired(db, size) == [(n, n + 1) for n in range(1, size + 1)]


@pytest.mark.parametrize("plan", ["hashjoin", "mergejoin", "nestloop"])
@SIZES
def test_rows_joined_and_sorted_on_the_way(db: psycopg.Connection[Any], size: int, plan: str) -> None:
    fill(db, size, "primary key deferrable initially deferred")
    db.execute(
        "create table moves as select n as mark, n % 4 * 100 + n as target from generate_series(1, 50) n"
    )
    for kind in {"hashjoin", "mergejoin", "nestloop"} - {plan}:
        db.execute(f"set enable_{kind} = off")
    db.execute("update t set id = moves.target from moves where moves.mark = t.mark and moves.target <> t.id")
    moved = sorted(mutations(db), key=lambda m: m.row["mark"])
    assert [(m.old["id"], m.row["id"]) for m in moved] == [
        (n, n % 4 * 100 + n) for n in range(1, size + 1) if n % 4
    ]


def test_rows_without_any_key_that_read_the_same(db: psycopg.Connection[Any]) -> None:
    db.execute("create table t (id int, mark int)")
    watch(db, "t")
    db.execute("insert into t select 1, 1 from generate_series(1, 30)")
    db.execute("update t set id = 2 where ctid in (select ctid from t limit 10)")
    found = mutations(db)
    assert {m.key for m in found} == {None}
    updates = [m for m in found if m.topic == "public.t.update"]
    assert len(updates) == 10
    assert all((m.old, m.row) == ({"id": 1, "mark": 1}, {"id": 2, "mark": 1}) for m in updates)


def test_one_table_updated_twice_in_one_statement(db: psycopg.Connection[Any]) -> None:
    fill(db, 60, "primary key deferrable initially deferred")
    db.execute(
        "with odd as (update t set id = 1000 - id where mark % 2 = 1 returning mark, id)"
        " update t set id = odd.id + 1000 from odd where t.mark = odd.mark + 1"
    )
    moved = paired(db, 60)
    assert moved == [(n, 1000 - n if n % 2 else 2000 - (n - 1)) for n in range(1, 61)]


@pytest.mark.parametrize("rows", [3, 40])
def test_the_key_is_the_primary_keys_text(db: psycopg.Connection[Any], rows: int) -> None:
    cases = {
        "id int primary key": "n",
        "id text primary key": """'a "b" ' || n""",
        "id uuid primary key": "md5(n::text)::uuid",
        "id timestamptz primary key": "timestamptz '2026-01-01 12:00+02' + n * interval '1 s'",
        "id numeric primary key": "n + 0.25",
        "id bytea primary key": "decode(lpad(to_hex(n), 2, '0'), 'hex')",
        "id int4range primary key": "int4range(n, n + 5)",
    }
    for number, (column, value) in enumerate(cases.items()):
        db.execute(f"create table k{number} ({column})")
        watch(db, f"k{number}")
        db.execute(f"insert into k{number} select {value} from generate_series(1, {rows}) n")
        for mutation in mutations(db):
            assert mutation.key == str(mutation.row["id"])
    db.execute("create table two (b text, a int, c int, primary key (a, b) include (c))")
    watch(db, "two")
    db.execute("insert into two select 'x\"y', n, 5 from generate_series(1, %s) n", [rows])
    for mutation in mutations(db):
        assert json.loads(mutation.key or "") == [mutation.row["a"], 'x"y']
        assert mutation.key == f'[{mutation.row["a"]}, "x\\"y"]'


BUILT_IN = """
  id int, part text, b boolean, f float8, r real, n numeric, t timestamptz, d date, i interval, y bytea,
  jb jsonb, a int[], g int4range, x xml, u uuid, c char(3), "Odd ""name%" text, place int, whole int, row int,
  old int, new int, primary key (part, id)
"""
BUILT_IN_VALUES = """
  n, 'p', n % 2 > 5, 'NaN'::float8, '-Infinity'::real, 'NaN'::numeric, timestamptz '2026-01-01 00:00Z',
  date '2026-02-01', interval '1 day 2 s', '\\x00ff'::bytea, '{"k": 1}'::jsonb, '{1,null}'::int[],
  int4range(1, 2), '<a/>'::xml, '00000000-0000-0000-0000-000000000001'::uuid, 'ab'::char(3), 'o', 1, 2, 3,
  4, 5
"""
CHANGE = """
  b = null, f = 1.1::float8, n = 'Infinity', t = 'infinity', d = '-infinity', y = null, a = '{}', place = 7,
  "Odd ""name%" = 'p', row = null
"""
OF_THE_USER = """
  , '{"a": "\\u0000", "a": 1e999}'::json, 'ill'::mood, row(1, '"\\u0000"')::pair, '{well}'::mood[],
  array['"\\u0000"'::json]
"""


@pytest.mark.parametrize("types", ["built in", "of the user"])
def test_few_rows_and_many_read_alike(db: psycopg.Connection[Any], types: str) -> None:
    """Two ways of making the same events, for rows of every type, whatever the session's settings are."""
    columns, values, change = BUILT_IN, BUILT_IN_VALUES, CHANGE
    db.execute("create type mood as enum ('well', 'ill'); create type pair as (a int, b json)")
    if types == "of the user":
        columns += ", j json, m mood, p pair, ms mood[], js json[]"
        values += OF_THE_USER
        change += ", j = '[1]', m = 'well', p = null, ms = null"
    db.execute(f"create table t ({columns})")
    watch(db, "t")
    db.execute(
        "set timezone = 'America/New_York'; set datestyle = 'German'; set intervalstyle = 'iso_8601';"
        "set bytea_output = 'escape'; set extra_float_digits = -15"
    )
    for few_or_many in ("n = 1", "n > 1"):
        db.execute(f"insert into t select {values} from generate_series(1, 41) n where {few_or_many}")
    for few_or_many in ("id = 1", "id > 1"):
        db.execute(f"update t set {change} where {few_or_many}")
        db.execute(f"delete from t where {few_or_many}")
    texts = db.execute(
        "select topic, key, payload::text, headers::text from pgmb.log_main"
        " order by (regexp_match(payload::text, '\\d+'))[1]::int, seq"
    ).fetchall()
    assert len(texts) == 41 * 3
    assert '"2026-01-01T00:00:00+00:00"' in texts[0][2]
    assert '"Odd \\"name%":"o"' in texts[0][2]
    for number in (2, 41):
        for (topic, key, payload, headers), first in zip(texts[number * 3 - 3 :], texts[:3], strict=False):
            assert topic == first[0]
            assert key == first[1].replace("1]", f"{number}]")
            assert payload == first[2].replace('"id":1,', f'"id":{number},')
            assert headers == (first[3] and first[3].replace('"id":1,', f'"id":{number},'))
