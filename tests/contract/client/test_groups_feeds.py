"""Feeds of a group: fire and forget, one tail for all, bounded memory, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest

import pgmb
from harness.waiting import until, until_true


@pytest.fixture
async def broker(dsn: str) -> AsyncGenerator[pgmb.AsyncBroker]:
    async with await pgmb.aconnect(dsn) as connected:
        yield connected


def subscribed(db: psycopg.Connection[Any]) -> int:
    ((count,),) = db.execute("select count(*) from pgmb.subscription").fetchall()
    return int(count)


async def taken(feed: Any, count: int) -> list[Any]:
    """Payloads, as many as these at least."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        async for batch in feed:
            found += [event.payload for event in batch]
            if len(found) >= count:
                break
    return found


async def test_each_hears_what_it_asked_for(broker: pgmb.AsyncBroker) -> None:
    group = broker.group("node")
    async with (
        group.listen(["a.*"]) as patterns,
        group.listen(filter="$.payload > 1") as filtered,
        group.listen(condition="e.topic = s.params ->> 'topic'", params={"topic": "b"}) as condition,
    ):
        await broker.publish("a.x", 1)
        await broker.publish("b", 2)
        await broker.publish("a.y", 3)
        assert await taken(patterns, 2) == [1, 3]
        assert await taken(filtered, 2) == [2, 3]
        assert await taken(condition, 1) == [2]


async def test_nothing_between_the_beginning_and_the_first_batch_is_missed(broker: pgmb.AsyncBroker) -> None:
    """Defect 10 of a peer: what came between start and registration was skipped."""
    group = broker.group("node")
    await broker.publish("a", -1)
    for turn in range(5):
        feeds = [group.listen(["a"]) for _ in range(3)]
        for number, feed in enumerate(feeds):
            await feed.start()
            await broker.publish("a", (turn, number))
        assert (await taken(feeds[0], 3))[-3:] == [[turn, 0], [turn, 1], [turn, 2]]
        assert (await taken(feeds[2], 1))[-1] == [turn, 2]
        await feeds[1].close()


async def test_a_late_commit_is_heard(broker: pgmb.AsyncBroker, dsn: str) -> None:
    heard: list[Any] = []
    async with (
        asyncio.timeout(60),
        await psycopg.AsyncConnection.connect(dsn) as conn,
        broker.group("node").listen(["a"]) as feed,
    ):
        await broker.publish("a", 1, conn=conn)
        await broker.publish("a", 2)
        async for batch in feed:
            heard += [event.payload for event in batch]
            if heard == [2]:
                await conn.commit()
            if len(heard) == 2:
                break
    assert heard == [2, 1]


async def test_leaving_the_loop_ends_the_subscription(
    broker: pgmb.AsyncBroker, db: psycopg.Connection[Any]
) -> None:
    group = broker.group("node")
    keeper = await group.subscribe(["x"])

    async def broken_off() -> None:
        async for _ in group.listen(["a"]):
            break

    async def raising() -> None:
        async for _ in group.listen(["a"]):
            raise ZeroDivisionError

    async def cancelled() -> None:
        async for _ in group.listen(["never"]):
            pass

    tasks = [asyncio.create_task(one()) for one in (broken_off, raising, cancelled)]
    await until(lambda: subscribed(db) == 3)  # two of them are equal
    await broker.publish("a", 1)
    await asyncio.wait(tasks[:2])
    await until(lambda: subscribed(db) == 2)
    tasks[2].cancel()
    await asyncio.wait(tasks)
    await until(lambda: subscribed(db) == 1)
    assert [type(task.exception()) for task in tasks[:2]] == [type(None), ZeroDivisionError]
    async with group.listen(["a"]):
        assert subscribed(db) == 2
    assert [one.id for one in await group.subscriptions()] == [keeper]
    ended = [one async for one in group.listen(["a"], max_wait=0.05)]
    assert ended == []
    assert subscribed(db) == 1


async def test_a_feed_may_be_closed_by_another(broker: pgmb.AsyncBroker) -> None:
    feed = broker.group("node").listen()
    waiting = asyncio.create_task(taken(feed, 1))
    await asyncio.sleep(0)
    await feed.close()
    assert await waiting == []
    await feed.start()
    assert await taken(feed, 1) == [], "closed is closed"


async def test_equal_feeds_of_other_processes_do_not_end_each_other(
    broker: pgmb.AsyncBroker, dsn: str
) -> None:
    async with broker.group("node").listen(["a"]) as feed:
        async with await pgmb.aconnect(dsn) as other, other.group("node").listen(["a"]) as second:
            await broker.publish("a", 1)
            assert await taken(second, 1) == [1]
        await broker.publish("a", 2)
        assert await taken(feed, 2) == [1, 2]


async def test_a_slow_reader_holds_up_nobody_and_memory_is_bounded(broker: pgmb.AsyncBroker) -> None:
    group = broker.group("node")
    async with group.listen(["a"], max_pending=100) as slow, group.listen(["a"], max=50) as fast:
        await broker.publish_many("a", range(3000))
        assert await taken(fast, 3000) == list(range(3000))
        assert fast.dropped == 0
        assert slow.dropped == 2900
        assert await taken(slow, 100) == list(range(2900, 3000)), "the oldest made room"


async def test_batches_are_no_larger_than_asked_for(broker: pgmb.AsyncBroker) -> None:
    async with broker.group("node").listen(["a"], max=7) as feed:
        await broker.publish_many("a", range(100))
        sizes: list[int] = []
        async for batch in feed:
            sizes.append(len(batch))
            if sum(sizes) == 100:
                break
    assert max(sizes) == 7


async def test_one_tail_reads_for_all(broker: pgmb.AsyncBroker, db: psycopg.Connection[Any]) -> None:
    group = broker.group("node")
    feeds = [group.listen(["a"], equals={"payload": {"room": room}}) for room in range(200)]
    for feed in feeds:
        await feed.start()
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert names.count("pgmb group") == 1
    assert subscribed(db) == 200
    await broker.publish_many("a", [{"room": room} for room in range(200)])
    for room, feed in enumerate(feeds):
        assert await taken(feed, 1) == [{"room": room}], room
    await until(lambda: subscribed(db) == 0)
    assert "pgmb group" not in [task.get_name() for task in asyncio.all_tasks()]


async def test_a_subscription_that_expired_is_made_anew_before_reading_on(
    broker: pgmb.AsyncBroker, db: psycopg.Connection[Any]
) -> None:
    """As if the process had been stopped for long, and the janitor come by."""
    async with broker.group("node").listen(["a"], expires_after=1) as feed:
        db.execute("delete from pgmb.subscription")
        await until(lambda: subscribed(db) == 1)
        await broker.publish("a", 1)
        assert await taken(feed, 1) == [1]


async def test_feeds_outlive_lost_connections(broker: pgmb.AsyncBroker, db: psycopg.Connection[Any]) -> None:
    async with broker.group("node").listen(["a"]) as feed:
        await broker.publish("a", 1)
        heard = asyncio.create_task(taken(feed, 2))
        await until(lambda: len(feed.buffer) == 0)
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid()"
        )
        db.execute("select pgmb.publish('a', '2')")
        assert await heard == [1, 2]


async def test_a_feed_says_why_it_cannot_go_on(broker: pgmb.AsyncBroker) -> None:
    await broker.create_stream("s")
    async with broker.group("node", stream="s").listen() as feed:
        await broker.drop_stream("s")
        with pytest.raises((pgmb.PgmbError, psycopg.Error)):
            await taken(feed, 1)
    with pytest.raises(pgmb.NotFound):
        await broker.group("node", stream="missing").listen().start()


async def test_a_feed_whose_condition_raises_is_told_and_the_others_go_on(broker: pgmb.AsyncBroker) -> None:
    group = broker.group("node")
    async with (
        group.listen(["a"], condition="(e.payload ->> 'n')::int > 0", expires_after=2) as raising,
        group.listen(["a"]) as other,
    ):
        await broker.publish("a", {"n": "abc"})
        assert await taken(other, 1) == [{"n": "abc"}]
        with pytest.raises(pgmb.errors.SubscriptionPaused, match="invalid input syntax"):
            await taken(raising, 1)


def test_synchronously_too(dsn: str, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(dsn) as broker:
        group = broker.group("node")
        heard: dict[int, list[Any]] = {}

        def listen(number: int) -> None:
            heard[number] = []
            for batch in group.listen(["a"], filter="$.payload >= $n", params={"n": number}):
                heard[number] += [event.payload for event in batch]
                if heard[number][-1] == 99:
                    break

        threads = [threading.Thread(target=listen, args=[number]) for number in range(5)]
        for thread in threads:
            thread.start()
        until_true(lambda: subscribed(db) == 5)
        broker.publish_many("a", range(100))
        for thread in threads:
            thread.join(60)
        assert heard == {number: list(range(number, 100)) for number in range(5)}
        gc.collect()
        until_true(lambda: subscribed(db) == 0)
        left = group.listen(["a"])
        left.start()
    assert subscribed(db) == 0, "the broker's end is theirs"


PROGRAM = """
    import sys, pgmb
    with pgmb.connect(sys.argv[1]) as broker:
        with broker.group("node").listen(["a"], expires_after=2) as feed:
            print("listening", flush=True)
            for batch in feed:
                print(*(event.payload for event in batch), flush=True)
"""


def test_a_killed_process_leaves_nothing_for_long(dsn: str, db: psycopg.Connection[Any]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), dsn], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        db.execute("select pgmb.publish('a', '1')")
        assert process.stdout.readline() == "1\n"
        os.kill(process.pid, signal.SIGKILL)
    assert subscribed(db) == 1

    def gone() -> bool:
        db.execute("select pgmb.maintain()")
        return subscribed(db) == 0

    until_true(gone)
