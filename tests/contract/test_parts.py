"""Dividing a batch among readers: parts hold what pgmb.between gives, each event once, however it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgmb.errors import HistoryGone
from pgmb.spark.source.offsets import SeqRange, ShardOffset, between
from pgmb.spark.source.queries import columns_for, select
from pgmb.spark.source.shards import ShardLog
from pgmb.types import Position
from tests.conftest import Connect

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

Db = psycopg.Connection[Any]


def publish(connection: Db, events: int) -> None:
    connection.execute(
        "insert into pgmb.log_main (topic, payload) select 't', '1' from generate_series(1, %s)", [events]
    )


def numbers(db: Db, stretch: Any) -> Iterator[list[int]]:
    """The numbers that each part gives."""
    for part in stretch.ranges:
        statement = select("main", columns_for(["seq"]), stretch.after, stretch.upto, part, "")
        with db.transaction():
            db.execute("set local enable_seqscan = off")
            yield [seq for (seq,) in db.execute(statement).fetchall()]


@pytest.fixture
def log(dsn: str) -> Iterator[ShardLog]:
    opened = ShardLog(dsn, "main")
    yield opened
    opened.close()


@pytest.mark.parametrize("seed", range(8))
def test_parts_hold_each_committed_event_once(
    log: ShardLog, db: Db, dsn: str, connect: Connect, seed: int
) -> None:
    chance = random.Random(seed)
    writers = [connect(dsn) for _ in range(5)]
    for writer in writers:
        writer.autocommit = False
    mark = ShardOffset(log.earliest())
    found: list[int] = []
    for _ in range(60):
        writer = chance.choice(writers)
        match chance.randrange(8):
            case 0:
                writer.commit()
            case 1:
                writer.rollback()
            case 2:
                # An xid of its own before the first number.
                writer.execute("select pg_current_xact_id()")
            case 3:
                db.execute("select pgmb.rotate('main')")
            case 4:
                publish(db, chance.randrange(1, 40))
            case _:
                publish(writer, chance.randrange(1, 30))
        limit = chance.choice([None, None, 1, 7, 25])
        for _ in range(chance.randrange(3)):
            mark = _step(log, db, mark, limit, chance, found)
    for writer in writers:
        writer.commit()
    while True:
        before = mark
        mark = _step(log, db, mark, chance.choice([None, 50]), chance, found)
        if mark == before:
            break
    committed = [seq for (seq,) in db.execute("select seq from pgmb.log_main").fetchall()]
    assert sorted(found) == sorted(committed)


def _step(
    log: ShardLog, db: Db, mark: ShardOffset, limit: int | None, chance: random.Random, found: list[int]
) -> ShardOffset:
    size, parts = chance.choice([3, 10, 500_000]), chance.choice([1, 1, 4])
    sliced = log.advance(mark, log.frontier(), limit, size, parts)
    stretch = between(mark, sliced.offset)
    if stretch is None:
        return mark
    read = [seq for part in numbers(db, stretch) for seq in part]
    assert read == sorted(read)
    if limit is not None:
        assert len(read) <= limit
    expected = db.execute(
        "select e.seq from pgmb.between('main', %s::pgmb.position, %s::pgmb.position, %s, 1000000) e",
        [str(stretch.after), str(stretch.upto), mark.seq],
    ).fetchall()
    upto = sliced.offset.seq if sliced.offset.to_position else None
    assert read == [seq for (seq,) in expected if upto is None or seq <= upto]
    if sliced.offset.to_position is not None:
        assert read, "a cut stretch holds something"
    found += read
    return sliced.offset


def test_a_transaction_that_straggles_with_much_is_walked_in_parts(
    log: ShardLog, db: Db, connect: Connect, dsn: str
) -> None:
    late = connect(dsn)
    late.autocommit = False
    publish(db, 100)
    publish(late, 12_000)
    publish(db, 100)
    first = log.advance(ShardOffset(log.earliest()), log.frontier(), None, 500_000, 1)
    late.commit()
    publish(db, 10)
    rest = log.advance(first.offset, log.frontier(), None, 5_000, 1)
    assert [part.late for part in rest.offset.ranges] == [False] * 4
    stretch = between(first.offset, rest.offset)
    assert [len(part) for part in numbers(db, stretch)][-1] == 10
    assert sum(len(part) for part in numbers(db, stretch)) == 12_010
    # With a limit, page by page, none twice.
    mark, found = first.offset, 0
    while mark.from_position == first.offset.from_position:
        sliced = log.advance(mark, log.frontier(), 5_000, 500_000, 1)
        read = [len(part) for part in numbers(db, between(mark, sliced.offset))]
        assert sum(read) <= 5_000
        found += sum(read)
        mark = sliced.offset
    assert found == 12_010


def test_numbers_that_were_rolled_back_make_no_empty_stretches(
    log: ShardLog, db: Db, connect: Connect, dsn: str
) -> None:
    publish(db, 5)
    undone = connect(dsn)
    undone.autocommit = False
    publish(undone, 3_000)
    undone.rollback()
    publish(db, 5)
    mark, steps = ShardOffset(log.earliest()), []
    while True:
        sliced = log.advance(mark, log.frontier(), 4, 500_000, 1)
        if sliced.offset == mark:
            break
        steps.append(sum(len(part) for part in numbers(db, between(mark, sliced.offset))))
        mark = sliced.offset
    assert sum(steps) == 10
    assert len(steps) <= 6


@pytest.mark.slow
def test_the_cost_of_dividing_does_not_grow_with_the_log(log: ShardLog, db: Db) -> None:
    publish(db, 20_000)
    start = log.advance(ShardOffset(log.earliest()), log.frontier(), None, 500_000, 1).offset

    def touched() -> int:
        publish(db, 100)
        db.execute("select pg_stat_force_next_flush()")
        frontier = log.frontier()
        with db.transaction():
            plan = db.execute(
                "explain (analyze, buffers, format json) select * from pgmb.divide('main', %s::pgmb.position,"
                " %s::pgmb.position, 0, %s, max => 50)",
                [start.from_position, frontier.position, frontier.last],
            ).fetchone()
        assert plan is not None
        found = plan[0][0]["Plan"]
        return int(found["Shared Hit Blocks"] + found["Shared Read Blocks"])

    touched()
    before = touched()
    publish(db, 200_000)
    start = log.advance(start, log.frontier(), None, 500_000, 1).offset
    assert touched() <= before * 1.5 + 30


def test_what_retention_took_is_named(log: ShardLog, db: Db) -> None:
    publish(db, 10)
    mark = log.advance(ShardOffset(log.earliest()), log.frontier(), None, 500_000, 1).offset
    publish(db, 10)
    db.execute("select pgmb.rotate('main')")
    publish(db, 10)
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s', drop_unread => true)")
    for _ in range(5):
        db.execute("select pgmb.maintain()")
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (10,)
    with pytest.raises(HistoryGone, match=r"numbers 11 to 20, published until .* were dropped by retention"):
        log.advance(mark, log.frontier(), None, 500_000, 1)
    # From the earliest on, what is kept is all there is.
    fresh = log.advance(ShardOffset(log.earliest()), log.frontier(), None, 500_000, 1)
    assert [len(part) for part in numbers(db, between(ShardOffset(log.earliest()), fresh.offset))] == [10]


def test_a_statement_names_only_what_is_asked_for() -> None:
    at = Position.parse('(1,5,7,9,"10:12:10,11",5,12)')
    late = select("main", ["seq"], at, at, SeqRange(0, 5, late=True), " and e.topic = 't'")
    assert "'{10,11}'::xid8[]" in late
    assert "e.topic = 't'" in late
    assert columns_for(["stream", "position"]) == ["seq"]
    assert columns_for(["id"]) == ["seq", "id", "published_at"]
    assert columns_for(["payload", "topic"]) == ["topic", "payload"]


def test_a_driver_outlives_a_connection_that_is_lost(log: ShardLog, db: Db) -> None:
    publish(db, 3)
    before = log.frontier()
    assert log.home
    db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pgmb spark'"
        " and datname = current_database()"
    )
    assert log.frontier() == before


def test_a_database_that_was_never_reached_is_told_at_once() -> None:
    with pytest.raises(psycopg.OperationalError):
        ShardLog("host=127.0.0.1 port=1 dbname=nowhere", "main").frontier()
