"""What a role that may publish to a stream tries beyond that: none of it works."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.states import queue_number
from pgmb.errors import InvalidArgument, translated
from tests.contract.cast import Cast
from tests.contract.test_privileges import refused, rows


@pytest.fixture
def publisher(cast: Cast) -> psycopg.Connection[Any]:
    return cast.acting(cast.role("publisher", "pgmb_publisher"))


def test_a_publisher_cannot_lock_a_shared_table(publisher: psycopg.Connection[Any]) -> None:
    for (table,) in rows(publisher, "select oid::regclass::text from pg_class where relkind in ('r', 'p')"):
        for mode in (
            "access exclusive",
            "exclusive",
            "share row exclusive",
            "share",
            "share update exclusive",
        ):
            with publisher.transaction(force_rollback=True):
                refused(publisher, f"lock table {table} in {mode} mode nowait")


@pytest.mark.parametrize("table", ["delayed", "dedup"])
def test_a_publisher_cannot_see_or_remove_what_waits(publisher: psycopg.Connection[Any], table: str) -> None:
    for statement in (f"delete from pgmb.{table}", f"truncate pgmb.{table}", f"select id from pgmb.{table}"):
        refused(publisher, statement)


def test_an_event_is_cancelled_by_its_id_and_the_right_to_publish(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    db.execute("select pgmb.create_stream('a'), pgmb.create_stream('b')")
    role = cast.role("publisher")
    db.execute("select pgmb.grant_publish('a', %s)", [role])
    publisher = cast.acting(role)
    ((mine,),) = rows(publisher, "select pgmb.publish('t', '1', stream => 'a', delay => '1 year')")
    ((theirs,),) = rows(db, "select pgmb.publish('t', '1', stream => 'b', delay => '1 year')")
    assert rows(publisher, "select pgmb.cancel(%s)", mine) == [(True,)]
    assert rows(publisher, "select pgmb.cancel(%s)", mine) == [(False,)]
    assert rows(publisher, "select pgmb.cancel(%s)", theirs) == [(False,)], "as if it were not there"
    assert rows(db, "select pgmb.cancel(%s)", theirs) == [(True,)]


@pytest.mark.parametrize("time", ["infinity", "-infinity", "1815-12-10", "now"])
def test_a_publisher_cannot_set_the_time_of_an_event(publisher: psycopg.Connection[Any], time: str) -> None:
    refused(publisher, "insert into pgmb.log_main (topic, payload, published_at) values ('t', '1', %s)", time)
    with (
        pytest.raises(psycopg.errors.InsufficientPrivilege),
        publisher.cursor().copy("copy pgmb.log_main (topic, payload, published_at) from stdin") as copy,
    ):
        copy.write_row(("t", "1", time))


TOO_LONG = {"topic": ("t" * 256, "k"), "topic in bytes": ("ü" * 128, "k"), "key": ("t", "k" * 1001)}


WAYS = {
    "publish": "select pgmb.publish(%s, '1', %s)",
    "publish later": "select pgmb.publish(%s, '1', %s, delay => '1 day')",
    "publish many": "select pgmb.publish_many(array[%s], array['1'::json], array[%s])",
    "delayed": "insert into pgmb.delayed (id, stream, due_at, topic, key, payload)"
    " values (gen_random_uuid(), 'main', now(), %s, %s, '1')",
}


@pytest.mark.parametrize(("topic", "key"), TOO_LONG.values(), ids=TOO_LONG)
def test_an_event_with_a_long_topic_or_key_is_refused(
    publisher: psycopg.Connection[Any], topic: str, key: str
) -> None:
    def copied() -> None:
        with publisher.cursor().copy("copy pgmb.log_main (topic, key, payload) from stdin") as copy:
            copy.write_row((topic, key, "1"))

    refusal = pytest.raises(InvalidArgument, match=r"must have (1 to 255|at most 1000) bytes")
    for statement in WAYS.values():
        with refusal, translated():
            publisher.execute(statement, [topic, key])
    with refusal, translated():
        copied()


def test_the_longest_key_passes_through_an_ordered_queue(
    db: psycopg.Connection[Any], publisher: psycopg.Connection[Any]
) -> None:
    """Random, so that it cannot be compressed: an index row holds at most 2,704 bytes."""
    db.execute("select pgmb.create_queue('q', ordered => true)")
    ((key,),) = rows(db, "select left(string_agg(md5(random()::text), ''), 1000) from generate_series(1, 40)")
    publisher.execute("select pgmb.publish(%s, '1', %s), pgmb.publish(%s, '2', %s)", ["t" * 255, key] * 2)
    ((lease, payload),) = rows(db, "select lease, payload from pgmb.receive('q', 1)")
    assert payload == 1
    db.execute("select pgmb.retry(%s, after => '0 s')", [lease])
    assert rows(db, "select payload from pgmb.receive('q', 1)") == [(1,)]


def test_a_table_with_a_long_primary_key_publishes_a_digest_of_it(db: psycopg.Connection[Any]) -> None:
    """The user's own write must not fail."""
    db.execute("create table wide (id text primary key)")
    db.execute("select pgmb.push_table_mutations('wide')")
    db.execute("insert into wide values (%s), ('short')", ["x" * 5000])
    db.execute("insert into wide select %s || n from generate_series(1, 30) n", ["x" * 5000])
    keys = [key for (key,) in rows(db, "select key from pgmb.log_main order by seq")]
    assert keys[1] == "short"
    assert all(key.startswith("sha256:") and len(key) == 71 for key in [keys[0], *keys[2:]])
    assert len(set(keys)) == 32


@pytest.mark.parametrize("dedup_for", ["infinity", "400 days", "100 years"])
def test_a_deduplication_key_is_not_taken_for_longer_than_a_year(
    publisher: psycopg.Connection[Any], dedup_for: str, pg_major: int
) -> None:
    if dedup_for != "infinity" or pg_major >= 17:
        with pytest.raises(InvalidArgument, match="at most 366 days"), translated():
            publisher.execute(
                "select pgmb.publish('t', '1', dedup_key => 'k', dedup_for => %s::interval)", [dedup_for]
            )
    refused(
        publisher,
        "insert into pgmb.dedup (stream, key, id, expires_at)"
        " values ('main', 'k', gen_random_uuid(), case %s when 'infinity' then 'infinity'"
        " else now() + interval '400 days' end)",
        dedup_for,
    )


def test_a_publisher_cannot_set_how_much_room_a_queue_has(
    db: psycopg.Connection[Any], publisher: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('q', max_length => 2)")
    queue = queue_number(db)
    for room in ("2/1000000", "2/1000000/", "2/1000000/x"):
        publisher.execute("select set_config(%s, %s, false)", [f"pgmb.room_{queue}", room])
        publisher.execute("select pgmb.publish('t', '1')")
        ((noted,),) = rows(publisher, "select current_setting(%s)", f"pgmb.room_{queue}")
        assert noted != room, "the queue was counted"
        db.execute("select pgmb.purge('q')")
    publisher.execute("select pgmb.publish('t', '1'), pgmb.publish('t', '1')")
    forged = noted.replace(noted.split("/")[1], "1000000", 1)
    publisher.execute("select set_config(%s, %s, false)", [f"pgmb.room_{queue}", forged])
    with pytest.raises(psycopg.Error, match="is full"):
        publisher.execute("select pgmb.publish('t', '1')")
