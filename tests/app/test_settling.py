"""What becomes of leases: prolonged, settled with the handler's own writes, handed back, lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import settled_singly
from harness.waiting import until
from tests.app.stage import settled, working


@pytest.fixture
def ledger(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("create table ledger (seq bigint, attempt int)")
    return db


def written(ledger: psycopg.Connection[Any]) -> list[Any]:
    return ledger.execute("select attempt from ledger order by seq, attempt").fetchall()


async def expiry(broker: pgmb.AsyncBroker) -> datetime:
    async with broker.connection() as conn:
        cursor = await conn.execute("select expires_at from pgmb.queue_leases('q')")
        ((found,),) = await cursor.fetchall()
    assert isinstance(found, datetime)
    return found


@pytest.mark.parametrize("by_hand", [False, True])
async def test_leases_are_extended_in_time_after_the_queue_got_a_shorter_lease_for(
    dsn: str, by_hand: bool
) -> None:
    app, attempts, running, most = pgmb.App(dsn), list[int](), 0, 0
    app.queue("q", lease_for=60)
    done = asyncio.Event()

    @app.on("a", queue="q", concurrency=4)
    async def slow(event: pgmb.Delivery) -> None:
        nonlocal running, most
        attempts.append(event.attempt)
        running += 1
        most = max(most, running)
        await done.wait()
        running -= 1

    async def shorten_and_wait(broker: pgmb.AsyncBroker) -> None:
        # The worker's first look, which begins with a heartbeat, may still go by the former setting.
        await until(lambda: by_hand or broker.workers())
        await broker.alter_queue("q", lease_for=2.5)
        await broker.publish("a", 1)
        await until(lambda: bool(attempts))
        first = await expiry(broker)
        while await expiry(broker) < first + timedelta(seconds=5):
            assert not await broker.receive("q")
            await asyncio.sleep(0.2)
        done.set()

    if by_hand:
        async with await pgmb.aconnect(dsn) as broker:
            await app.ahandle("q")
            waiting = asyncio.create_task(shorten_and_wait(broker))
            await until(lambda: app.ahandle("q"))
            await waiting
            assert await settled(broker, "q")
        await app.aclose()
    else:
        async with working(app) as broker:
            await shorten_and_wait(broker)
            await until(lambda: settled(broker, "q"))
    assert (attempts, most) == ([1], 1)


async def test_a_lease_is_prolonged_while_a_handler_runs(dsn: str) -> None:
    app, attempts = pgmb.App(dsn), list[int]()
    app.queue("q", lease_for=2)
    done = asyncio.Event()

    @app.on("a", queue="q")
    async def slow(event: pgmb.Delivery) -> None:
        attempts.append(event.attempt)
        await done.wait()

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: bool(attempts))
        first = await expiry(broker)
        while await expiry(broker) < first + timedelta(seconds=2):
            # Another consumer finds nothing to take over.
            assert not await broker.receive("q")
            await asyncio.sleep(0.2)
        done.set()
        await until(lambda: settled(broker, "q"))
        assert await broker.dead_letters("q") == []
    assert attempts == [1]


async def test_ack_in_the_handlers_own_transaction_commits_with_it(
    dsn: str, ledger: psycopg.Connection[Any]
) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="async")
    async def store(event: pgmb.Delivery[int]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.transaction():
            await conn.execute("insert into ledger values (%s, %s)", [event.seq, event.attempt])
            assert await event.ack(conn=conn) == 1

    @app.on("a", queue="sync")
    def store_too(event: pgmb.Delivery[int]) -> None:
        with psycopg.connect(dsn) as conn, conn.transaction():
            conn.execute("insert into ledger values (%s, %s)", [event.seq, event.attempt])
            assert event.ack(conn=conn) == 1

    async with working(app) as broker:
        await broker.publish_many("a", range(5))
        await until(lambda: len(written(ledger)) == 10)
        for queue in ("async", "sync"):
            assert await broker.queue_depth(queue) == 0
    assert written(ledger) == [(1,)] * 10


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
async def test_what_is_rolled_back_is_delivered_again(
    raises: bool, dsn: str, ledger: psycopg.Connection[Any]
) -> None:
    app = pgmb.App(dsn)
    app.queue("q", lease_for=2)

    @app.on("a", queue="q", retry=0)
    async def store(event: pgmb.Delivery[int]) -> None:
        with contextlib.suppress(ZeroDivisionError) if not raises else contextlib.nullcontext():
            async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.transaction():
                await conn.execute("insert into ledger values (%s, %s)", [event.seq, event.attempt])
                await event.ack(conn=conn)
                if event.attempt == 1:
                    raise ZeroDivisionError

    async with working(app) as broker:
        await broker.publish_many("a", range(3))
        await until(lambda: len(written(ledger)) == 3)
        await until(lambda: settled(broker, "q"))
        assert await broker.dead_letters("q") == []
    assert written(ledger) == [(2,)] * 3


async def test_whoever_settles_too_late_is_told_and_rolls_back(
    dsn: str, ledger: psycopg.Connection[Any]
) -> None:
    app, lost = pgmb.App(dsn), list[int]()

    @app.on("a", queue="q", retry=0)
    async def store(event: pgmb.Delivery[int]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn, conn.transaction():
            await conn.execute("insert into ledger values (%s, %s)", [event.seq, event.attempt])
            if not lost:
                # As if this process had slept for longer than its lease.
                ledger.execute("select pgmb.seek('q', pgmb.earliest('main'))")
                lost.append(event.seq)
            await event.ack(conn=conn)

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: len(written(ledger)) == 1)
    assert written(ledger) == [(1,)]


async def test_a_lost_lease_is_logged_and_the_work_goes_on(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    @app.on("a", queue="q", concurrency=1)
    async def handle(number: int) -> None:
        if not seen:
            db.execute("select pgmb.seek('q', pgmb.earliest('main'))")
        seen.append(number)

    async with working(app) as broker:
        await broker.publish_many("a", range(3))
        await until(lambda: len(seen) >= 4)
        await until(lambda: settled(broker, "q"))
        assert await broker.dead_letters("q") == []
    assert "is lost" in caplog.text


async def test_batches(dsn: str) -> None:
    app = pgmb.App(dsn)
    plain: list[list[int]] = []
    rich: list[list[int]] = []

    @app.on("a", queue="archive", batch=10, concurrency=2)
    async def archive(numbers: list[int]) -> None:
        plain.append(numbers)

    @app.on("a", queue="note", batch=10, concurrency=1)
    def note(events: list[pgmb.Delivery[int]]) -> None:
        rich.append([event.payload for event in events])

    async with working(app) as broker:
        await broker.publish_many("a", range(35))
        await until(lambda: settled(broker, "archive"))
        await until(lambda: settled(broker, "note"))
    for batches in (plain, rich):
        assert sorted(chain.from_iterable(batches)) == list(range(35))
        assert max(map(len, batches)) == 10
    assert list(chain.from_iterable(rich)) == list(range(35))


async def test_of_a_batch_single_events_may_fail(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[tuple[int, int]]()

    @app.on("a", queue="q", batch=10, max_attempts=3)
    async def archive(events: list[pgmb.Delivery[int]]) -> None:
        for event in events:
            seen.append((event.payload, event.attempt))
            if event.payload == 3:
                event.reject("three")
            elif event.payload == 4 and event.attempt == 1:
                event.retry(after=0, reason="four")

    async with working(app) as broker:
        await broker.publish_many("a", range(6))
        await broker.publish("a", "six")
        await until(lambda: settled(broker, "q"))
        letters = await broker.dead_letters("q")
        assert [(letter.error, letter.attempt) for letter in letters if letter.event.payload == 3] == [
            ("three", 1)
        ]
    assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (5, 1)]


async def test_a_batch_that_raises_is_tried_again_as_a_whole(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[list[int]]()

    @app.on("a", queue="q", batch=10, retry=0)
    async def archive(numbers: list[int]) -> None:
        seen.append(sorted(numbers))
        if len(seen) == 1:
            raise ValueError

    async with working(app) as broker:
        async with broker.connection() as conn, conn.transaction():
            await broker.publish_many("a", [1, 2, 3], conn=conn)
            await broker.publish("a", "unfit", conn=conn)
        await until(lambda: settled(broker, "q"))
        (letter,) = await broker.dead_letters("q")
        assert letter.event.payload == "unfit"
    assert seen == [[1, 2, 3], [1, 2, 3]]


async def test_a_batch_handler_is_alone_in_its_queue() -> None:
    app = pgmb.App("")
    app.on("a", queue="q", batch=5)(lambda events: None)
    with pytest.raises(pgmb.InvalidArgument, match="its only one"):
        app.on("a", queue="q")(lambda event: None)


async def test_in_an_ordered_queue_keys_run_one_after_another_and_side_by_side(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.queue("q", ordered=True)
    running: set[str] = set()
    seen: dict[str, list[int]] = {}
    widest = 0

    @app.on("a", queue="q", concurrency=4)
    async def handle(event: pgmb.Delivery[int]) -> None:
        nonlocal widest
        assert event.key is not None
        assert event.key not in running
        running.add(event.key)
        widest = max(widest, len(running))
        await asyncio.sleep(0.001)
        running.discard(event.key)
        seen.setdefault(event.key, []).append(event.payload)

    async with working(app) as broker:
        await broker.publish_many([pgmb.NewEvent("a", n, key=f"k{n % 5}") for n in range(100)])
        await until(lambda: sum(map(len, seen.values())) == 100)
        await until(lambda: settled(broker, "q"))
        assert await broker.dead_letters("q") == []
    assert seen == {f"k{k}": list(range(k, 100, 5)) for k in range(5)}
    assert widest > 1


async def test_in_an_ordered_queue_nothing_overtakes_what_failed(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.queue("q", ordered=True)
    seen: dict[str, list[int]] = {}
    failed: dict[str, int] = {}

    @app.on("a", queue="q", retry=0.01, concurrency=4)
    async def handle(event: pgmb.Delivery[int]) -> None:
        key = str(event.key)
        if event.payload % 7 == 3 and failed.get(key, -1) < event.payload:
            failed[key] = event.payload
            raise ValueError
        if event.payload % 11 == 5:
            raise pgmb.Reject("eleven")
        seen.setdefault(key, []).append(event.payload)

    async with working(app) as broker:
        await broker.publish_many([pgmb.NewEvent("a", n, key=f"k{n % 4}") for n in range(80)])
        await until(lambda: settled(broker, "q"))
        letters = await broker.dead_letters("q")
        assert sorted(letter.event.payload for letter in letters) == [n for n in range(80) if n % 11 == 5]
        assert {letter.attempt for letter in letters} <= {1, 2}
    assert seen == {f"k{k}": [n for n in range(k, 80, 4) if n % 11 != 5] for k in range(4)}


async def test_at_the_end_what_runs_is_finished_and_the_rest_is_handed_back_untried(dsn: str) -> None:
    app, begun, done = pgmb.App(dsn), list[int](), list[int]()
    leave = asyncio.Event()

    @app.on("a", queue="q", concurrency=2)
    async def handle(number: int) -> None:
        begun.append(number)
        await leave.wait()
        done.append(number)

    stop = asyncio.Event()
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q", ["a"])
        await broker.publish_many("a", range(2))
        task = asyncio.create_task(app.work(stop))
        await until(lambda: len(begun) == 2)
        await broker.publish_many("a", range(2, 10))
        stop.set()
        await asyncio.sleep(0.05)
        assert not task.done()
        leave.set()
        await task
        lease = await broker.receive("q")
        assert {(event.payload, event.attempt) for event in lease} == {(n, 1) for n in range(2, 10)}
    assert sorted(begun) == sorted(done) == [0, 1]


async def test_what_does_not_finish_in_its_grace_is_handed_back(dsn: str) -> None:
    app, begun = pgmb.App(dsn, grace=0.1), list[Any]()
    stuck = threading.Event()

    @app.on("a", queue="async", concurrency=1)
    async def endless(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(3600)

    @app.on("a", queue="sync", concurrency=1)
    def blocking(number: int) -> None:
        begun.append(number)
        stuck.wait(60)

    async with working(app) as broker:
        await broker.publish_many("a", range(3))
        await until(lambda: len(begun) == 2)
    async with await pgmb.aconnect(dsn) as broker:
        for queue in ("async", "sync"):
            events = [*(await broker.receive(queue)), *(await broker.receive(queue))]
            assert sorted((event.payload, event.attempt) for event in events) == [(0, 1), (1, 1), (2, 1)]
    stuck.set()


async def test_what_is_done_of_a_long_lease_is_settled_while_the_rest_runs(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    app, begun = pgmb.App(dsn), list[int]()
    leave = asyncio.Event()

    @app.on("a", queue="q", concurrency=2, retry=3600)
    async def handle(number: int) -> None:
        begun.append(number)
        if number == 0:
            await leave.wait()
        if number == 1:
            raise ValueError

    async with working(app) as broker:
        await broker.publish_many("a", range(10))
        await until(lambda: len(begun) == 10)

        async def swept() -> bool:
            (status,) = await broker.queue_status()
            return status.retries == 1 and status.leased_events - settled_singly(db) <= 1

        await until(swept)
        leave.set()
        await until(lambda: len(begun) == 10)
