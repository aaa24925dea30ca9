"""Table events: every committed mutation of a watched table is published once, in its own transaction."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.conftest import Connect
from tests.contract.mutations import Mutation, mutations, watch

FEW, MANY = 2, 50
"""Below and above the size from which a statement of its own is made for the table."""


@pytest.fixture
def users(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("create table users (id int primary key, name text, email text)")
    watch(db, "users")
    return db


def insert(db: psycopg.Connection[Any], size: int) -> None:
    db.execute("insert into users select n, 'user ' || n, null from generate_series(1, %s) n", [size])


def row(number: int, name: str | None = None) -> dict[str, Any]:
    return {"id": number, "name": name or f"user {number}", "email": None}


@pytest.mark.parametrize("size", [FEW, MANY])
def test_an_insert_publishes_every_row(users: psycopg.Connection[Any], size: int) -> None:
    insert(users, size)
    assert mutations(users) == [Mutation("public.users.insert", str(n), row(n)) for n in range(1, size + 1)]


@pytest.mark.parametrize("size", [FEW, MANY])
def test_an_update_carries_the_old_row_and_what_changed(users: psycopg.Connection[Any], size: int) -> None:
    insert(users, size)
    mutations(users)
    users.execute("update users set name = upper(name), email = case id when 1 then 'a\"b' end")
    expected = [
        Mutation(
            "public.users.update",
            str(n),
            row(n, f"USER {n}") | {"email": 'a"b' if n == 1 else None},
            row(n),
            {"name": f"USER {n}"} | ({"email": 'a"b'} if n == 1 else {}),
        )
        for n in range(1, size + 1)
    ]
    assert sorted(mutations(users), key=lambda m: m.row["id"]) == expected


@pytest.mark.parametrize("size", [FEW, MANY])
def test_a_delete_carries_the_old_row(users: psycopg.Connection[Any], size: int) -> None:
    insert(users, size)
    mutations(users)
    users.execute("delete from users where id > 1")
    assert mutations(users) == [Mutation("public.users.delete", str(n), row(n)) for n in range(2, size + 1)]


@pytest.mark.parametrize("size", [FEW, MANY])
def test_rows_that_stay_as_they_are_are_left_out(users: psycopg.Connection[Any], size: int) -> None:
    insert(users, size)
    mutations(users)
    users.execute("update users set name = name")
    users.execute("update users set name = case id when 2 then null else name end")
    assert mutations(users) == [
        Mutation("public.users.update", "2", row(2) | {"name": None}, row(2), {"name": None})
    ]


def test_a_statement_that_touches_no_row_publishes_nothing(users: psycopg.Connection[Any]) -> None:
    users.execute("update users set name = 'x'")
    users.execute("delete from users")
    users.execute("insert into users select 1 where false")
    assert mutations(users) == []


def test_truncate_is_reported_once_a_table(users: psycopg.Connection[Any]) -> None:
    users.execute("create table posts (author int references users)")
    watch(users, "posts", insert=False, update=False, delete=False)
    insert(users, FEW)
    mutations(users)
    users.execute("truncate users cascade")
    assert sorted(mutations(users)) == [
        Mutation("public.posts.truncate", None, None),
        Mutation("public.users.truncate", None, None),
    ]


def test_what_is_rolled_back_was_never_published(users: psycopg.Connection[Any], connect: Connect) -> None:
    writer = connect(autocommit=False)
    insert(writer, MANY)
    writer.execute("savepoint before")
    writer.execute("update users set name = 'x'")
    writer.execute("rollback to before")
    writer.execute("delete from users where id = 1")
    assert users.execute("select count(*) from pgmb.log_main").fetchone() == (0,)
    writer.commit()
    topics = [m.topic for m in mutations(users)]
    assert topics == ["public.users.insert"] * MANY + ["public.users.delete"]
    insert_more = "insert into users values (1000)"
    writer.execute(insert_more)
    writer.rollback()
    assert mutations(users) == []


@pytest.mark.parametrize("size", [FEW, MANY])
def test_copy_publishes_every_row(users: psycopg.Connection[Any], size: int) -> None:
    with users.cursor().copy("copy users (id, name) from stdin") as copy:
        for number in range(size):
            copy.write_row((number, f"user {number}"))
    assert mutations(users) == [Mutation("public.users.insert", str(n), row(n)) for n in range(size)]


@pytest.mark.parametrize("size", [FEW, MANY])
def test_an_upsert_tells_what_was_inserted_from_what_was_updated(
    users: psycopg.Connection[Any], size: int
) -> None:
    insert(users, size - 1)
    mutations(users)
    users.execute(
        "insert into users select n, 'new', null from generate_series(1, %s) n"
        " on conflict (id) do update set name = excluded.name where users.id <> 1",
        [size + 1],
    )
    found = mutations(users)
    assert [m.row["id"] for m in found if m.topic.endswith("insert")] == [size, size + 1]
    assert sorted(m.row["id"] for m in found if m.topic.endswith("update")) == list(range(2, size))
    assert all(m.old["id"] == m.row["id"] for m in found if m.topic.endswith("update"))
    assert len(found) == size


@pytest.mark.parametrize("size", [3, MANY])
def test_merge_publishes_each_of_its_actions(users: psycopg.Connection[Any], size: int) -> None:
    insert(users, size)
    mutations(users)
    users.execute(
        "merge into users u using generate_series(2, %s) n on u.id = n"
        " when matched and n = 2 then delete"
        " when matched then update set name = 'merged'"
        " when not matched then insert values (n, 'new', null)",
        [size + 2],
    )
    found = mutations(users)
    assert [m.key for m in found if m.topic == "public.users.delete"] == ["2"]
    assert sorted(int(m.key or "") for m in found if m.topic == "public.users.update") == list(
        range(3, size + 1)
    )
    assert sorted(int(m.key or "") for m in found if m.topic == "public.users.insert") == [
        size + 1,
        size + 2,
    ]


def test_several_parts_of_one_statement_are_all_published(users: psycopg.Connection[Any]) -> None:
    insert(users, FEW)
    mutations(users)
    users.execute(
        "with gone as (delete from users where id = 1 returning *),"
        " renamed as (update users set name = 'x' where id = 2 returning *)"
        " insert into users select id + 10, name, null from gone"
        " union all select id + 10, name, null from renamed"
    )
    assert sorted(m[:2] for m in mutations(users)) == [
        ("public.users.delete", "1"),
        ("public.users.insert", "11"),
        ("public.users.insert", "12"),
        ("public.users.update", "2"),
    ]


def test_foreign_keys_that_cascade_publish(users: psycopg.Connection[Any]) -> None:
    users.execute(
        "create table posts (id int primary key,"
        " author int references users on delete cascade on update cascade)"
    )
    watch(users, "posts")
    insert(users, 3)
    users.execute("insert into posts values (1, 1), (2, 2), (3, 2)")
    mutations(users)
    users.execute("update users set id = 20 where id = 2")
    users.execute("delete from users where id < 30")
    found = [m for m in mutations(users) if m.topic.startswith("public.posts")]
    assert sorted(found) == [
        Mutation("public.posts.delete", "1", {"id": 1, "author": 1}),
        Mutation("public.posts.delete", "2", {"id": 2, "author": 20}),
        Mutation("public.posts.delete", "3", {"id": 3, "author": 20}),
        Mutation("public.posts.update", "2", {"id": 2, "author": 20}, {"id": 2, "author": 2}, {"author": 20}),
        Mutation("public.posts.update", "3", {"id": 3, "author": 20}, {"id": 3, "author": 2}, {"author": 20}),
    ]


def test_what_the_tables_own_triggers_do_is_published_too(users: psycopg.Connection[Any]) -> None:
    users.execute(
        "create function tidy() returns trigger language plpgsql as $$ begin"
        " new.name := trim(new.name); return new; end $$;"
        "create trigger tidy before insert or update on users for each row execute function tidy();"
        "create function mirror() returns trigger language plpgsql as $$ begin"
        " if pg_trigger_depth() < 3 then insert into users values (new.id + 100, new.name || ' '); end if;"
        " return null; end $$;"
        "create trigger mirror after insert on users for each row execute function mirror()"
    )
    users.execute("insert into users values (1, ' a ')")
    assert sorted(m.row["id"] for m in mutations(users)) == [1, 101, 201]


def test_logical_replication_publishes_nothing_a_second_time(users: psycopg.Connection[Any]) -> None:
    """What applies changes of another server runs so; that server has published them."""
    users.execute("set session_replication_role = replica")
    insert(users, FEW)
    users.execute("reset session_replication_role")
    assert mutations(users) == []


def test_a_queue_receives_them_and_keeps_the_order_of_each_row(users: psycopg.Connection[Any]) -> None:
    users.execute("select pgmb.create_queue('q', '{public.users.*}', ordered => true)")
    users.execute("insert into users values (1, 'a')")
    users.execute("update users set name = 'b'")
    users.execute("delete from users")
    seen = []
    while rows := users.execute(
        "select lease, topic, headers -> 'old' ->> 'name' from pgmb.receive('q')"
    ).fetchall():
        seen += [row[1:] for row in rows]
        users.execute("select pgmb.ack(%s)", [rows[0][0]])
    assert seen == [
        ("public.users.insert", None),
        ("public.users.update", "a"),
        ("public.users.delete", None),
    ]


@pytest.mark.slow
def test_twenty_thousand_rows_in_one_statement(users: psycopg.Connection[Any]) -> None:
    users.execute("set work_mem = '256kB'")
    insert(users, 20_000)
    users.execute("update users set name = name || '!' where id <> 7")
    users.execute("update users set id = id + 1000000")
    counted = users.execute(
        "select topic, count(*), count(distinct key),"
        " count(*) filter (where payload ->> 'name' = (headers -> 'old' ->> 'name') || '!'),"
        " count(*) filter (where (payload ->> 'id')::int = (headers -> 'old' ->> 'id')::int + 1000000)"
        " from pgmb.log_main group by topic order by topic"
    ).fetchall()
    assert counted == [
        ("public.users.insert", 20_000, 20_000, 0, 0),
        ("public.users.update", 39_999, 39_999, 19_999, 20_000),
    ]


def test_a_long_transaction_leaves_nothing_open(users: psycopg.Connection[Any]) -> None:
    with users.transaction():
        for number in range(5):
            users.execute("insert into users values (%s)", [number])
            users.execute("update users set name = 'x' where id = %s", [number])
            users.execute("delete from users where id = %s", [number])
        assert users.execute("select count(*) from pg_cursors where name ~ 'unnamed portal'").fetchone() == (
            0,
        )
