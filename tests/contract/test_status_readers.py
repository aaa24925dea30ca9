"""Durable readers in status: what waits for them, how much it is, how late they are, what they hold back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import psycopg
import pytest

import pgmb
from tests.conftest import Connect
from tests.contract.cast import Cast

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

DB = psycopg.Connection[Any]


class Reader(NamedTuple):
    waiting: int
    waiting_bytes: int
    lag: timedelta | None
    held_segments: int
    held_for: timedelta | None
    lost: bool


def status(db: DB, reader: str = "r", stream: str = "main") -> Reader:
    rows = db.execute(
        "select waiting, waiting_bytes, lag, held_segments, held_for, lost from pgmb.reader_status"
        " where reader = %s and stream = %s",
        [reader, stream],
    ).fetchall()
    (row,) = rows
    return Reader(*row)


def publish(db: DB, count: int, size: int = 10, stream: str = "main") -> None:
    db.execute(
        "select pgmb.publish_many('t', array(select to_json(repeat(md5(n::text), %s / 32 + 1))"
        " from generate_series(1, %s) n), stream => %s)",
        [size, count, stream],
    )


def confirm(db: DB, reader: str = "r", stream: str = "main") -> None:
    db.execute("select pgmb.confirm(%s, %s, pgmb.position(%s))", [stream, reader, stream])


def grow_old(db: DB, stream: str = "main") -> None:
    """Segments that are sealed were published a day ago."""
    db.execute("update pgmb.segment set last_published_at = last_published_at - interval '1 day'")


def test_a_reader_waits_for_what_came_after_its_position(db: DB) -> None:
    publish(db, 50)
    confirm(db)
    assert status(db) == (0, 0, None, 0, None, False)
    publish(db, 7)
    seen = status(db)
    assert seen.waiting == 7
    assert seen.waiting_bytes > 0
    assert seen.lag is not None
    assert timedelta(0) < seen.lag < timedelta(minutes=5)
    confirm(db)
    assert status(db) == (0, 0, None, 0, None, False)


def test_the_earliest_position_waits_for_everything(db: DB) -> None:
    publish(db, 20)
    db.execute("select pgmb.rotate()")
    publish(db, 5)
    db.execute("select pgmb.confirm('main', 'r', pgmb.earliest())")
    assert status(db).waiting == 25


def test_bytes_are_about_what_the_events_take(db: DB) -> None:
    publish(db, 2000, size=1000)
    confirm(db)
    publish(db, 1000, size=1000)
    assert 0.8e6 < status(db).waiting_bytes < 2e6
    db.execute("select pgmb.rotate()")
    publish(db, 1000, size=1000)
    assert 1.6e6 < status(db).waiting_bytes < 4e6


def test_a_late_commit_below_the_position_waits(db: DB, connect: Connect) -> None:
    slow = connect(autocommit=False)
    publish(slow, 3)
    publish(db, 10)
    confirm(db)
    assert status(db) == (0, 0, None, 0, None, False), "nobody can read what is not committed"
    slow.commit()
    seen = status(db)
    assert seen.waiting == 3
    assert seen.waiting_bytes > 0
    assert seen.lag is not None
    after = db.execute("select position from pgmb.reader").fetchone()
    assert after is not None
    read = db.execute("select count(*) from pgmb.between('main', %s::pgmb.position, pgmb.position())", after)
    assert read.fetchone() == (3,)
    confirm(db)
    assert status(db).waiting == 0


def test_what_lies_above_the_number_of_a_position_but_before_it_does_not_wait(db: DB) -> None:
    """A transaction with an id of its own notes the number of the last tick."""
    publish(db, 10)
    with db.transaction():
        db.execute("select pg_current_xact_id()")
        confirm(db)
    number = db.execute("select (position).seq from pgmb.reader").fetchone()
    assert number == (0,)
    assert status(db) == (0, 0, None, 0, None, False)
    publish(db, 2)
    assert status(db).waiting == 2


def test_rolled_back_events_count_only_between_others(db: DB) -> None:
    confirm(db)
    with db.transaction(force_rollback=True):
        publish(db, 100)
    assert status(db).waiting == 0
    publish(db, 1)
    assert status(db).waiting == 1
    with db.transaction(force_rollback=True):
        publish(db, 100)
    assert status(db).waiting == 101, "an upper estimate"


def test_the_cost_does_not_grow_with_the_backlog(db: DB) -> None:
    confirm(db)

    def blocks() -> int:
        db.execute("select count(*) from pgmb.reader_status")
        plan = db.execute(
            "explain (analyze, buffers, format json) select * from pgmb.reader_status"
        ).fetchone()
        assert plan is not None
        top = plan[0][0]["Plan"]
        return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])

    publish(db, 100)
    few = blocks()
    for _ in range(10):
        publish(db, 5000)
    assert status(db).waiting == 50_100
    assert blocks() < few + 200


def test_a_position_that_noted_no_number_is_looked_at_in_bounds(db: DB) -> None:
    publish(db, 12_000)
    with db.transaction():
        db.execute("select pg_current_xact_id()")
        confirm(db)
    assert 0 < status(db).waiting <= 2_001, "an upper estimate, after the first 10,000"


def test_it_tells_who_holds_back_retention_and_for_how_long(db: DB) -> None:
    db.execute("select pgmb.alter_stream('main', keep_for => '1 hour')")
    confirm(db)
    confirm(db, "quick")
    publish(db, 10)
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.maintain()")
    assert status(db).held_segments == 0, "not yet old enough"
    grow_old(db)
    confirm(db, "quick")
    seen = status(db)
    assert seen.held_segments == 1
    assert seen.held_for is not None
    assert timedelta(hours=22) < seen.held_for < timedelta(hours=24)
    assert status(db, "quick")[3:] == (0, None, False)
    db.execute("select pgmb.forget('main', 'r')")
    db.execute("select pgmb.maintain()")
    assert status(db, "quick").lost is False


def test_a_reader_that_lost_events_is_told_of(db: DB) -> None:
    db.execute("select pgmb.alter_stream('main', keep_for => '1 hour', drop_unread => true)")
    confirm(db)
    publish(db, 10)
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.maintain()")
    grow_old(db)
    assert status(db).held_segments == 0
    db.execute("select pgmb.maintain()")
    seen = status(db)
    assert seen.lost
    assert seen.waiting == 0
    with pytest.raises(psycopg.DatabaseError, match="dropped by retention"):
        db.execute("select pgmb.between('main', (select position from pgmb.reader), pgmb.position())")


def test_a_role_sees_the_readers_of_streams_that_it_may_read(db: DB, cast: Cast) -> None:
    db.execute("select pgmb.create_stream('audit')")
    confirm(db)
    confirm(db, stream="audit")
    role = cast.role("reader")
    as_role = cast.acting(role)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        as_role.execute("select * from pgmb.reader_status")
    db.execute("select pgmb.grant_read('audit', %s)", [role])
    assert as_role.execute("select stream from pgmb.reader_status").fetchall() == [("audit",)]
    db.execute("select pgmb.create_queue('q'), pgmb.grant_consume('q', %s)", [role])
    assert as_role.execute("select stream from pgmb.reader_status").fetchall() == [("audit",)]
    consumer = cast.acting(cast.role("consumer", "pgmb_consumer"))
    assert consumer.execute("select count(*) from pgmb.reader_status").fetchone() == (2,)


async def test_both_clients_have_them(dsn: str, db: DB) -> None:
    confirm(db, "a reader, with [odd] signs")
    publish(db, 3)
    with pgmb.connect(dsn) as broker:
        (seen,) = broker.reader_status()
        assert (seen.reader, seen.stream, seen.waiting) == ("a reader, with [odd] signs", "main", 3)
        assert len(broker.between("main", seen.position, broker.position())) == 3
        assert seen.lag is not None
        assert seen.confirmed_at.tzinfo is not None
        assert (seen.held_segments, seen.held_for, seen.lost) == (0, None, False)
        broker.forget("main", seen.reader)
    async with await pgmb.aconnect(dsn) as broker:
        assert await broker.reader_status() == []
