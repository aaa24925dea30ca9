"""Handlers that misbehave, and circumstances that are not the usual ones."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pgmb
from harness.pgbouncer import PgBouncer
from harness.server import Server
from harness.waiting import until
from tests.app.stage import settled, working


async def test_a_handler_that_refuses_to_be_cancelled_is_done_when_it_is_done(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("a", queue="q", timeout=0.1, concurrency=1)
    async def stubborn(what: str) -> None:
        if what == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
        seen.append(what)

    async with working(app) as broker:
        await broker.publish("a", "stubborn")
        await until(lambda: seen == ["stubborn"])
        # The worker is none the worse for it, and can be stopped.
        await broker.publish("a", "next")
        await until(lambda: seen == ["stubborn", "next"])
        await until(lambda: settled(broker, "q"))
        assert await broker.dead_letters("q") == []


async def test_handlers_that_never_wait_let_others_run(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[int]()
    app.queue("busy", lease_for=2)
    ticks = 0

    @app.on("a", queue="busy", concurrency=2)
    async def busy(number: int) -> None:
        time.sleep(0.015)  # noqa: ASYNC251 - that is the point
        seen.append(number)

    async def tick() -> None:
        nonlocal ticks
        while len(seen) < 200:
            ticks += 1
            await asyncio.sleep(0)

    async with working(app) as broker:
        await broker.publish_many("a", range(200))
        await tick()
        await until(lambda: settled(broker, "busy"))
    assert sorted(seen) == list(range(200))
    assert ticks > 10


async def test_it_stops_before_it_has_begun(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.on("a", queue="q")(lambda event: None)
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(30):
        await app.work(stop)
    for delay in (0.0, 0.01, 0.03):
        stop = asyncio.Event()
        task = asyncio.create_task(app.work(stop))
        await asyncio.sleep(delay)
        stop.set()
        async with asyncio.timeout(30):
            await task


async def test_work_that_is_cancelled_ends(dsn: str) -> None:
    app, begun = pgmb.App(dsn), asyncio.Event()

    @app.on("a", queue="q")
    async def endless(payload: Any) -> None:
        begun.set()
        await asyncio.sleep(3600)

    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q", ["a"])
        await broker.publish("a", 1)
        task = asyncio.create_task(app.work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_many_outcomes_at_once_lose_and_repeat_nothing(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.queue("q", max_attempts=50)
    chance = random.Random(7)
    done: dict[int, int] = {}
    rejected: set[int] = set()

    @app.on("a", queue="q", concurrency=16, retry=0, timeout=20)
    async def handle(event: pgmb.Delivery[int]) -> None:
        await asyncio.sleep(chance.choice([0, 0, 0, 0.001, 0.01]))
        fate = chance.random()
        if fate < 0.1:
            raise ValueError("again")
        if fate < 0.15:
            raise pgmb.Retry(after=0)
        if fate < 0.2:
            rejected.add(event.payload)
            raise pgmb.Reject("no")
        if fate < 0.3:
            async with (await app.abroker()).connection() as conn, conn.transaction():
                await event.ack(conn=conn)
        done[event.payload] = done.get(event.payload, 0) + 1

    async with working(app) as broker:
        await broker.publish_many("a", range(1500))
        await until(lambda: len(done) + len(rejected) == 1500)

        async def buried() -> bool:
            letters = await broker.dead_letters("q", max=2000)
            return {letter.event.payload for letter in letters} == rejected

        await until(buried)
    await app.aclose()
    assert set(done.values()) == {1}
    assert not rejected & done.keys()


async def test_an_event_that_may_kill_its_process_is_held_alone(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.queue("q", lease_for=30, max_attempts=5)
    running: set[int] = set()
    beside: list[set[int]] = []

    @app.on("a", queue="q", concurrency=4)
    async def handle(number: int) -> None:
        running.add(number)
        if number == -1:
            beside.append(set(running))
            await asyncio.sleep(0.3)
            beside.append(set(running))
        else:
            await asyncio.sleep(0.01)
        running.discard(number)

    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q", ["a"], lease_for=30, max_attempts=5)
        await broker.publish("a", -1)

        async def expired() -> bool:
            lease = await broker.receive("q", lease_for=0.01)
            return bool(lease) and lease.events[0].attempt == 2

        # Two processes took it and were never heard of again.
        await until(expired)
        await broker.publish_many("a", range(50))
        async with working(app):
            await until(lambda: len(beside) == 2)
            await until(lambda: settled(broker, "q"))
    assert beside == [{-1}, {-1}]


async def test_a_failure_that_the_process_survived_makes_nobody_suspect(dsn: str) -> None:
    app, attempts = pgmb.App(dsn), list[int]()
    together = asyncio.Event()

    @app.on("a", queue="q", concurrency=2, retry=0, max_attempts=9)
    async def handle(event: pgmb.Delivery[str]) -> None:
        if event.payload == "other":
            together.set()
            return
        attempts.append(event.attempt)
        if event.attempt < 5:
            raise ValueError
        await together.wait()

    async with working(app) as broker:
        await broker.publish("a", "failing")
        await until(lambda: len(attempts) == 5)
        # Its fifth attempt holds nobody up.
        await broker.publish("a", "other")
        await until(lambda: settled(broker, "q"))
    assert attempts == [1, 2, 3, 4, 5]


async def test_two_apps_of_one_queue_share_it(dsn: str) -> None:
    seen: list[tuple[int, int]] = []
    apps = [pgmb.App(dsn), pgmb.App(dsn)]
    for number, app in enumerate(apps):

        @app.on("a", queue="q", concurrency=2)
        async def handle(payload: int, number: int = number) -> None:
            await asyncio.sleep(0.005)
            seen.append((payload, number))

    async with working(apps[0]) as broker, working(apps[1]):
        await broker.publish_many("a", range(200))
        await until(lambda: len(seen) >= 200)
        await until(lambda: settled(broker, "q"))
    assert sorted(payload for payload, _ in seen) == list(range(200))
    assert {number for _, number in seen} == {0, 1}


async def test_sessions_of_sqlalchemy_settle_with_their_writes(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("create table ledger (queue text, number int)")
    app = pgmb.App(dsn)
    url = "postgresql+psycopg://"

    engine = create_engine(url, creator=lambda: psycopg.connect(dsn))
    aengine = create_async_engine(url, async_creator=lambda: psycopg.AsyncConnection.connect(dsn))
    insert = text("insert into ledger values (:queue, :number)")

    @app.on("a", queue="sync", retry=0)
    def sync(event: pgmb.Delivery[int]) -> None:
        with Session(engine) as session, session.begin():
            session.execute(insert, {"queue": "sync", "number": event.payload})
            event.ack(conn=session)
            if event.attempt == 1:
                raise ValueError

    @app.on("a", queue="async", retry=0)
    async def asynchronous(event: pgmb.Delivery[int]) -> None:
        async with AsyncSession(aengine) as session, session.begin():
            await session.execute(insert, {"queue": "async", "number": event.payload})
            await event.ack(conn=session)
            if event.attempt == 1:
                raise ValueError

    async with working(app) as broker:
        await broker.publish("a", 5)
        await until(lambda: settled(broker, "sync"))
        await until(lambda: settled(broker, "async"))
        await until(lambda: len(db.execute("select from ledger").fetchall()) == 2)
    engine.dispose()
    await aengine.dispose()
    assert sorted(db.execute("select * from ledger").fetchall()) == [("async", 5), ("sync", 5)]


@pytest.fixture
def pooled(server: Server, db: psycopg.Connection[Any]) -> Iterator[str]:
    with PgBouncer.start(server, settings={"default_pool_size": 2}) as bouncer:
        yield bouncer.dsn(db.info.dbname)


async def test_behind_a_pooler_it_polls(pooled: str) -> None:
    app, seen = pgmb.App(pooled), list[int]()

    @app.on("a", queue="q", retry=0)
    async def handle(event: pgmb.Delivery[int]) -> None:
        if event.attempt == 1 and event.payload == 3:
            raise ValueError
        seen.append(event.payload)

    async with working(app) as broker:
        for number in range(5):
            await broker.publish("a", number)
            await asyncio.sleep(0.05)
        await until(lambda: sorted(seen) == [0, 1, 2, 3, 4])
        await until(lambda: settled(broker, "q"))
