"""Tails: every commit once, from a place that can be taken up again, and nothing left in the database."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgmb
from harness.postgres import Server
from pgmb._core import cursor, patterns
from pgmb._core.cursor import ReadCursor
from tests.conftest import Connect, FreshServer

LONG = 60.0


def payloads(events: list[pgmb.Event]) -> list[Any]:
    return [event.payload for event in events]


async def taken(tail: Any, count: int) -> list[pgmb.Event]:
    async with asyncio.timeout(LONG):
        return [await anext(tail) for _ in range(count)]


def test_a_tail_that_does_not_follow_ends_with_what_is_committed(broker: pgmb.Broker) -> None:
    broker.publish_many("a.b", range(2500))
    broker.publish("c", "other")
    everything = list(broker.tail(after=broker.earliest(), follow=False))
    assert payloads(everything) == [*range(2500), "other"]
    assert payloads(list(broker.tail("a.*", "x", after=broker.earliest(), follow=False))) == list(range(2500))
    assert list(broker.tail(follow=False)) == []
    assert list(broker.tail("#.z", after=broker.earliest(), follow=False)) == []


def test_a_pattern_that_is_none_is_refused_at_once(broker: pgmb.Broker) -> None:
    with pytest.raises(pgmb.InvalidArgument):
        broker.tail("a*")


def test_no_such_stream(broker: pgmb.Broker) -> None:
    with pytest.raises(pgmb.NotFound):
        next(broker.tail(stream="nothing"))


@pytest.mark.parametrize("listen", [True, False])
async def test_it_follows_as_events_are_committed(dsn: str, listen: bool) -> None:
    async with await pgmb.aconnect(dsn) as broker, broker.tail("a.#", listen=listen) as tail:
        for turn in range(3):
            await broker.publish("b", "not this")
            await broker.publish_many("a", [turn * 10 + n for n in range(3)])
            assert payloads(await taken(tail, 3)) == [turn * 10 + n for n in range(3)]


@pytest.mark.parametrize("listen", [True, False])
def test_it_follows_in_a_thread_and_ends_when_closed(dsn: str, listen: bool) -> None:
    seen: list[Any] = []
    with pgmb.connect(dsn) as broker, broker.tail(listen=listen) as tail:
        thread = threading.Thread(target=lambda: seen.extend(event.payload for event in tail))
        thread.start()
        broker.publish_many("a", range(5))
        deadline = time.monotonic() + LONG
        while len(seen) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        tail.close()
        thread.join(LONG)
        assert not thread.is_alive()
    assert seen == list(range(5))


def test_it_ends_when_nothing_came_for_so_long_and_can_go_on(broker: pgmb.Broker) -> None:
    with broker.tail(max_wait=0.2, listen=False) as tail:
        assert list(tail) == []
        broker.publish("a", 1)
        assert payloads(list(tail)) == [1]


def test_a_late_commit_is_not_skipped(broker: pgmb.Broker, connect: Connect) -> None:
    slow = connect(autocommit=False)
    slow.execute("select pgmb.publish('a', '\"slow\"')")
    with broker.tail(max_wait=1, listen=False) as tail:
        broker.publish("a", "quick")
        assert payloads(list(tail)) == ["quick"]
        slow.commit()
        assert payloads(list(tail)) == ["slow"]


@pytest.mark.parametrize("stop_after", [0, 1, 999, 1000, 1001, 1700])
def test_a_place_is_where_to_go_on_without_gap_or_repetition(broker: pgmb.Broker, stop_after: int) -> None:
    broker.publish_many([pgmb.NewEvent(f"t.{n % 2}", n) for n in range(3500)])
    tail = broker.tail("t.0", after=broker.earliest(), follow=False)
    first = [next(tail) for _ in range(stop_after)]
    text = str(tail.position)
    assert ReadCursor.parse(text) == tail.position
    broker.publish("t.0", "later")
    rest = list(broker.tail("t.0", after=text, follow=False))
    assert payloads(first + rest) == [*range(0, 3500, 2), "later"]


def test_it_follows_over_rotation(broker: pgmb.Broker) -> None:
    with broker.tail(max_wait=2, listen=False) as tail:
        for n in range(4):
            broker.publish("a", n)
            broker.rotate()
            broker.maintain()
        assert payloads([next(tail) for _ in range(4)]) == list(range(4))


def test_history_that_is_gone_is_said_so(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.alter_stream("main", keep_for=0.0)
    start = broker.position()
    broker.publish("a", 1)
    broker.rotate()
    broker.publish("a", 2)
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        broker.maintain()
        if db.execute("select count(*) from pgmb.segment where dropped_at is not null").fetchone() != (0,):
            break
    with pytest.raises(pgmb.HistoryGone):
        list(broker.tail(after=start, follow=False))


def test_a_reader_needs_no_more_than_grant_read(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    db.execute("create role tail_reader login")
    try:
        db.execute("select pgmb.grant_read('main', 'tail_reader')")
        with (
            pgmb.connect(dsn, user="tail_reader") as reader,
            reader.tail("a", max_wait=LONG) as tail,
            reader.tail("a", max_wait=LONG, listen=False) as polling,
        ):
            broker.publish("a", 1)
            assert next(tail).payload == 1
            assert next(polling).payload == 1
        broker.create_stream("secret")
        with pgmb.connect(dsn, user="tail_reader") as reader, pytest.raises(pgmb.PermissionDenied):
            next(reader.tail(stream="secret", max_wait=0))
    finally:
        db.execute("drop owned by tail_reader")
        db.execute("drop role tail_reader")


def test_at_rest_it_takes_no_transaction_ids(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.publish("a", 1)
    taken: list[int] = []
    with broker.tail(max_wait=2, listen=False) as tail:
        list(tail)
        # Autovacuum takes some too, now and then, anywhere on the server.
        while 1 not in taken and len(taken) < 5:
            (before,) = db.execute("select pg_current_xact_id()::text::bigint").fetchone() or (0,)
            assert list(tail) == []
            (after,) = db.execute("select pg_current_xact_id()::text::bigint").fetchone() or (0,)
            taken.append(after - before)
    assert 1 in taken, taken


@pytest.mark.slow
async def test_at_rest_a_process_makes_at_most_two_statements_a_second(
    server: Server, dsn: str, db: psycopg.Connection[Any]
) -> None:
    """A consumer and two tails together: counted in the server's log, over ten seconds."""
    db.execute(f"alter database {db.info.dbname} set log_statement = 'all'")
    db.execute("select pgmb.create_queue('q')")
    mark = f"@{db.info.dbname} "
    async with await pgmb.aconnect(dsn) as broker:
        readers: list[Any] = [broker.tail(), broker.tail("a.*"), broker.consume("q")]
        tasks = [asyncio.create_task(anext(reader)) for reader in readers]
        async with asyncio.timeout(LONG):
            while not broker.listener().ticking:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(3)
        before = statements(server, mark)
        start = time.monotonic()
        await asyncio.sleep(10)
        rate = (statements(server, mark) - before) / (time.monotonic() - start)
        for reader in readers:
            reader.close()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert 0 < rate <= 2.4, "two a second, one more at either end of the measurement"


def statements(server: Server, mark: str) -> int:
    lines = server.log.read_text(errors="replace").splitlines()
    return sum(mark in line and ("statement:" in line or "execute" in line) for line in lines)


async def test_two_at_once_and_writers_that_commit_late(dsn: str, connect: Connect) -> None:
    """40 transactions of 5 events, open side by side and committed in another order, some rolled back."""
    async with await pgmb.aconnect(dsn) as broker:
        listening, polling = broker.tail(), broker.tail(listen=False)
        await listening.start()
        await polling.start()
        tasks = [asyncio.create_task(taken(tail, 160)) for tail in (listening, polling)]

        def write() -> None:
            for turn in range(10):
                writers = [psycopg.connect(dsn) for _ in range(4)]
                for n, writer in enumerate(writers):
                    for event in range(5):
                        writer.execute("select pgmb.publish('a', to_json(%s::text))", [f"{turn} {n} {event}"])
                for n in (2, 0, 3, 1):
                    writers[n].rollback() if n == 3 and turn % 2 == 0 else writers[n].commit()
                for writer in writers:
                    writer.close()

        await asyncio.to_thread(write)
        # 10 rounds of 20, less 5 rollbacks of 5.
        wanted = {
            f"{turn} {n} {event}"
            for turn in range(10)
            for n in range(4)
            for event in range(5)
            if not (n == 3 and turn % 2 == 0)
        }
        for tail, task in zip((listening, polling), tasks, strict=True):
            got = payloads(await task)
            got += payloads(await taken(tail, len(wanted) - 160))
            assert len(got) == len(wanted)
            assert set(got) == wanted
            tail.close()


async def test_after_a_lost_connection_it_goes_on_where_it_was(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await pgmb.aconnect(dsn) as broker, broker.tail() as tail:
        await broker.publish("a", 1)
        assert payloads(await taken(tail, 1)) == [1]
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        db.execute("select pgmb.publish('a', '2')")
        async with asyncio.timeout(LONG):
            while True:
                try:
                    event = await anext(tail)
                    break
                except psycopg.OperationalError:
                    continue
        assert event.payload == 2


@pytest.mark.crash
async def test_a_replica_serves_a_tail(fresh_server: FreshServer, install: Callable[[str], None]) -> None:
    primary = fresh_server(name="primary")
    install(primary.dsn())
    with primary.standby() as standby:
        standby.wait_for_replay(primary)
        async with (
            await pgmb.aconnect(primary.dsn()) as writer,
            await pgmb.aconnect(standby.dsn()) as reader,
            reader.tail() as tail,
        ):
            task = asyncio.create_task(taken(tail, 3))
            await writer.publish_many("a", range(3))
            await writer.tick()
            assert payloads(await task) == [0, 1, 2]


# -- the pure parts ------------------------------------------------------------------------------------------


EARLIEST = '(1,5,0,0,"3:3:",0,3)'


@pytest.mark.parametrize("text", ["", "x", EARLIEST + "|", f"{EARLIEST}|{EARLIEST}@-1", '(1,"3:3:",0,3,0/0)'])
def test_texts_that_are_no_cursor_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid position"):
        ReadCursor.parse(text)


def position(snapshot: str) -> pgmb.Position:
    return pgmb.Position(1, 5, 0, 0, snapshot, 0, 3)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("10:12:10", "10:11:10", True),
        ("10:11:10", "10:12:10", False),
        ("12:12:", "10:12:10", True),
        ("10:12:10", "12:12:", False),
        ("10:13:10,11", "10:13:10,11,12", True),
        ("10:12:10", "10:12:10", False),
    ],
)
def test_which_position_is_later(one: str, other: str, expected: bool) -> None:
    assert cursor.later(position(one), position(other)) is expected


words = st.lists(st.sampled_from(["a", "b", "", "*", "#", "é", "a b", "a+", "x\\"]), min_size=1, max_size=5)


def test_topics_match_as_they_do_in_sql(db: psycopg.Connection[Any]) -> None:
    @given(words.map(".".join).filter(bool), words.map(".".join))
    def alike(pattern: str, topic: str) -> None:
        row = db.execute("select pgmb.matches(%s, %s)", [pattern, topic]).fetchone()
        assert row == (patterns.matches(pattern, topic),)

    alike()
