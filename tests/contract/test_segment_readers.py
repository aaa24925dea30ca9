"""The functions by which a receive reads a few events: one for each segment."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pytest

Connection = psycopg.Connection[Any]


def readers(db: Connection) -> set[str]:
    found = db.execute(
        "select substr(proname, 6) from pg_proc"
        " where pronamespace = 'pgmb_internal'::regnamespace and proname ~ '^read_[0-9]+_[0-9]+$'"
    )
    return {name for (name,) in found}


def segments(db: Connection) -> set[str]:
    found = db.execute("select substr(relname, 9) from pg_class where relname ~ '^segment_[0-9]+_[0-9]+$'")
    return {name for (name,) in found}


def test_each_segment_has_a_reader_as_long_as_it_is_there(db: Connection) -> None:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.rotate('other')")
    assert len(segments(db)) > 4
    assert readers(db) == segments(db)

    db.execute("select pgmb.drop_stream('other')")
    assert readers(db) == segments(db)

    db.execute("select pgmb.rotate('main')")
    db.execute("update pgmb.segment set dropped_at = now() - interval '1 hour' where number = 0")
    assert db.execute("select pgmb.detach_dropped('main')").fetchone() == (1,)
    assert "1_0" not in segments(db)
    assert readers(db) == segments(db)


@pytest.mark.parametrize("patterns", ["{#}", "{order.paid,order.sent}", "{order.*}", "{*.paid,bill.#}"])
@pytest.mark.parametrize("raw", [True, False])
def test_few_and_many_events_are_read_alike(db: Connection, patterns: str, *, raw: bool) -> None:
    for queue in ("few", "many"):
        db.execute("select pgmb.create_queue(%s, %s::text[])", [queue, patterns])
    for topic in ("order.paid", "order.sent", "bill", "bill.paid", "other"):
        db.execute("select pgmb.publish(%s, '[1]', key => 'k', headers => '[2]')", [topic])
        db.execute(
            "insert into pgmb.log_main (id, topic, payload) values (gen_random_uuid(), %s, '2')", [topic]
        )
    events = "select seq, id, topic, key, payload::text, headers::text, published_at, attempt"

    def received(queue: str, size: int) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        while rows := db.execute(
            f"{events} from pgmb.receive(%s, %s, raw => %s)", [queue, size, raw]
        ).fetchall():
            found += rows
        return found

    assert received("few", 3) == received("many", 101)
    assert db.execute("select count(*) from pgmb.receive('few', 3)").fetchone() == (0,)


def test_new_patterns_hold_for_what_is_read_next(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q', '{a}')")
    for _ in range(2):
        db.execute("select pgmb.publish_many('a', array['1', '2']::json[])")
        db.execute("select pgmb.publish('b', '3')")
    assert db.execute("select topic from pgmb.receive('q', 2)").fetchall() == [("a",), ("a",)]
    db.execute("select pgmb.bind('q', '{b}')")
    rest = [row for _ in range(3) for row in db.execute("select topic from pgmb.receive('q', 2)")]
    assert rest == [("b",), ("b",)]


@pytest.mark.short_way
def test_a_plan_made_while_the_segment_was_empty_reads_by_its_numbers(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")
    for _ in range(7):
        db.execute("select pgmb.publish('t', '1')")
        assert db.execute("select count(*) from pgmb.receive('q', 1)").fetchone() == (1,)
    db.execute(
        "insert into pgmb.log_main (topic, payload)"
        " select 't', to_json(repeat('x', 200)) from generate_series(1, 20000)"
    )
    for _ in range(5):
        db.execute("select count(*) from pgmb.receive('q', 10)")
    ((plan,),) = db.execute(
        "explain (analyze, buffers, timing off, format json) select * from pgmb.receive('q', 10)"
    ).fetchall()
    root = plan[0]["Plan"]
    assert root["Actual Rows"] == 10
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < 60


def test_between_reads_few_and_many_numbers_alike(db: Connection) -> None:
    # The counts lie on both sides of the limit of 100 numbers. None of the rolled back events may appear.
    counts = (1, 99, 2, 100, 101, 30, 0, 250)
    positions = [str(scalar(db, "select pgmb.position()"))]
    for count in counts:
        with contextlib.suppress(psycopg.errors.DivisionByZero), db.transaction():
            db.execute("select pgmb.publish('undone', '1'), 1/0")
        db.execute("select pgmb.publish_many('a', array_fill('1'::json, array[%s::integer]))", [count])
        if count == 30:
            db.execute("select pgmb.rotate('main')")
        positions.append(str(scalar(db, "select pgmb.position()")))
    for first, after in enumerate(positions):
        for last, upto in enumerate(positions[first:], first):
            rows = db.execute(
                "select seq, topic from pgmb.between('main', %s::pgmb.position, %s::pgmb.position, 0, 10000)",
                [after, upto],
            ).fetchall()
            assert len(rows) == sum(counts[first:last]), (first, last)
            assert {topic for _, topic in rows} <= {"a"}
            pages = list[tuple[int, str]]()
            while page := db.execute(
                "select seq, topic from pgmb.between('main', %s::pgmb.position, %s::pgmb.position, %s, 90)",
                [after, upto, pages[-1][0] if pages else 0],
            ).fetchall():
                pages += page
            assert pages == rows, (first, last)


def scalar(db: Connection, query: str) -> Any:
    ((value,),) = db.execute(query.encode()).fetchall()
    return value


def test_sessions_that_knew_the_old_main_publish_to_and_read_the_new_one(db: Connection) -> None:
    """The function by which they read it is another one, and so is the salt of its ids."""
    for _ in range(2):
        db.execute("select pgmb.create_queue('q')")
        published = [db.execute("select pgmb.publish('a', '1')", prepare=True).fetchone() for _ in range(8)]
        # One at a time, as many times as it takes a session to keep a plan.
        received = [
            db.execute("select id from pgmb.receive('q', 1)", prepare=True).fetchone() for _ in published
        ]
        assert received == published
        db.execute("select pgmb.drop_queue('q'), pgmb.drop_stream('main')")
        db.execute("select pgmb.create_stream('main')")
