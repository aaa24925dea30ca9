"""An app outlives its server's restarts and lost connections, and loses nothing."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import psycopg
import pytest

import pgmb
from harness.postgres import create_database
from harness.waiting import until
from tests.app.stage import working
from tests.conftest import FreshServer


@pytest.mark.crash
async def test_a_server_restart_at_work_and_at_rest(
    fresh_server: FreshServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_server()
    dsn = server.dsn(create_database(server))
    pgmb.schema.install(dsn)
    app, seen = pgmb.App(dsn), set[int]()
    app.queue("q", lease_for=2)

    @app.on("a", queue="q", concurrency=4)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.002)
        seen.add(number)

    stop = asyncio.Event()
    task = asyncio.create_task(app.work(stop))
    await until(
        lambda: any("working on q" in record.message for record in caplog.records) or "q" in _queues(dsn)
    )

    def publish(numbers: range) -> None:
        with pgmb.connect(dsn) as broker:
            broker.publish_many("a", numbers)

    publish(range(1000))
    await until(lambda: len(seen) > 100)
    await asyncio.to_thread(server.restart, "immediate")
    await until(lambda: len(seen) == 1000)
    await asyncio.to_thread(server.restart, "fast")
    publish(range(1000, 1100))
    await until(lambda: len(seen) == 1100)
    stop.set()
    await task
    # One line a failed call, with pauses that grow: not a busy loop.
    assert 1 <= sum("retrying in" in record.message for record in caplog.records) < 60
    with pgmb.connect(dsn) as broker:
        assert broker.dead_letters("q") == []


def _queues(dsn: str) -> set[str]:
    with pgmb.connect(dsn) as broker:
        return {status.queue for status in broker.queue_status()}


def _more(seen: set[int], than: int) -> bool:
    return len(seen) > than


async def test_lost_connections_are_made_anew(dsn: str, db: psycopg.Connection[Any]) -> None:
    app, seen = pgmb.App(dsn), set[int]()
    app.queue("q", lease_for=2)

    @app.on("a", queue="q", concurrency=2)
    async def handle(number: int) -> None:
        await asyncio.sleep(0.001)
        seen.add(number)

    async with working(app) as broker:
        await broker.publish_many("a", range(600))
        for part in (50, 200, 400):
            await until(partial(_more, seen, part))
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        await until(lambda: len(seen) == 600)


async def test_a_server_that_is_down_at_the_end_does_not_hold_up_the_process(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server()
    dsn = server.dsn(create_database(server))
    pgmb.schema.install(dsn)
    app, begun = pgmb.App(dsn, grace=0.5), list[int]()

    @app.on("a", queue="q")
    async def handle(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(3600)

    stop = asyncio.Event()
    task = asyncio.create_task(app.work(stop))
    await until(lambda: "q" in _queues(dsn))
    with pgmb.connect(dsn) as broker:
        broker.publish("a", 1)
    await until(lambda: begun == [1])
    await asyncio.to_thread(server.stop, "immediate")
    stop.set()
    async with asyncio.timeout(40):
        await task
