"""At rest an app costs next to nothing, and is awake at once."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from functools import partial
from typing import Any

import psycopg
import pytest

import pgmb
from harness.postgres import create_database
from harness.stalling import StallingProxy
from harness.states import queue_names
from harness.waiting import until
from pgmb._core.concurrency import AsyncDeadline, Pace
from pgmb.app import declaring, idle
from tests.app.stage import working
from tests.conftest import FreshServer

WINDOW = 4.0


@pytest.mark.parametrize("listen", [True, False], ids=["listening", "polling"])
async def test_at_rest_a_process_makes_at_most_two_statements_a_second(
    listen: bool, fresh_server: FreshServer
) -> None:
    server = fresh_server(settings={"log_statement": "all", "autovacuum": False})
    dsn = server.dsn(create_database(server))
    pgmb.schema.install(dsn)
    app = pgmb.App(dsn, listen=listen)
    for number in range(30):
        app.on("a.#", queue=f"q{number}")(lambda event: None)

    def statements() -> list[str]:
        return re.findall(r"LOG:  (?:execute [^:]*|statement): (.*)", server.log.read_text(errors="replace"))

    stop = asyncio.Event()
    task = asyncio.create_task(app.work(stop))
    await until(lambda: sum("receive_any" in text for text in statements()) > 8)

    async def at_rest() -> bool:
        before, began = len(statements()), time.monotonic()
        await asyncio.sleep(WINDOW)
        return (len(statements()) - before) / (time.monotonic() - began) <= 2.0

    assert await at_rest() or await at_rest()
    stop.set()
    await task


def _last(seen: list[str], wanted: str) -> bool:
    return seen[-1:] == [wanted]


@pytest.mark.parametrize("listen", [True, False], ids=["listening", "polling"])
async def test_an_event_wakes_a_queue_at_rest(listen: bool, dsn: str, db: psycopg.Connection[Any]) -> None:
    app, seen = pgmb.App(dsn, listen=listen), list[str]()
    for number in range(3):
        app.on(f"topic{number}", queue=f"q{number}")(lambda event, number=number: seen.append(f"q{number}"))
    async with working(app) as broker:
        for number in (2, 0, 2, 1):
            await asyncio.sleep(0.2)
            await broker.publish(f"topic{number}", 1)
            await until(partial(_last, seen, f"q{number}"))
    assert seen == ["q2", "q0", "q2", "q1"]


async def test_a_tick_wakes_a_queue_at_rest(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pauses that outlast the test, only what is heard can wake it."""
    monkeypatch.setattr(idle, "Pace", lambda *pauses: Pace(3600, 3600))
    monkeypatch.setattr(idle, "LISTENING_PAUSE_SECONDS", 3600)
    app, seen = pgmb.App(dsn), list[int]()

    @app.on("a.b.*", "a.x", queue="q")
    async def handle(number: int) -> None:
        seen.append(number)

    async with working(app) as broker:
        for number in range(3):
            await broker.publish("a.x", number)

            async def heard() -> bool:
                # Again and again: the listener may not listen yet.
                await broker.publish("a", 1)
                await broker.tick()
                return len(seen) > number  # noqa: B023 - called at once

            await until(heard)
    assert seen == [0, 1, 2]


async def test_events_of_others_cost_no_look(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen, looks = pgmb.App(dsn), list[str](), list[list[str]]()
    look = idle.IdlePoller._look

    async def counted(self: idle.IdlePoller, queues: list[str]) -> None:
        looks.append(queues)
        await look(self, queues)

    monkeypatch.setattr(idle.IdlePoller, "_look", counted)
    monkeypatch.setattr(idle, "LISTENING_PAUSE_SECONDS", 3600)
    for topic in ("a", "b"):
        app.on(topic, queue=topic)(lambda event, topic=topic: seen.append(topic))
    async with working(app) as broker:

        async def published(topic: str) -> None:
            await broker.publish(topic, 1)
            await asyncio.to_thread(db.execute, "select pgmb.tick()")

        # Until both queues have heard that another process ticks.
        for topic in ("a", "b"):
            while topic not in seen:
                await published(topic)
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        looks.clear()
        for _ in range(20):
            await published("other")
            await asyncio.sleep(0.02)
        assert looks == []
        count = seen.count("b")
        await published("b")
        await until(lambda: seen.count("b") == count + 1)
        assert ["b"] in looks
        assert all(queues == ["b"] for queues in looks)


async def test_a_busy_queue_does_not_starve_the_others_at_rest(dsn: str) -> None:
    app, seen = pgmb.App(dsn), {"busy": 0, "calm": 0}

    @app.on("busy", concurrency=1)
    async def busy(number: int) -> None:
        seen["busy"] += 1
        await app.apublish("busy", number + 1)

    @app.on("calm")
    async def calm(number: int) -> None:
        seen["calm"] += 1

    async with working(app) as broker:
        await broker.publish("busy", 1)
        await until(lambda: seen["busy"] > 5)
        for count in range(1, 4):
            await broker.publish("calm", 1)
            await until(lambda: seen["calm"] >= count)  # noqa: B023 - called at once
    await app.aclose()


async def test_news_of_one_queue_does_not_delay_the_retry_of_another(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    app, tries, busy = pgmb.App(dsn), list[float](), list[int]()

    @app.on("calm", queue="calm")
    async def calm(number: int) -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise pgmb.Retry(after=0.5)

    app.on("busy", queue="busy")(lambda event: busy.append(1))
    async with working(app) as broker:

        async def published(topic: str) -> None:
            await broker.publish(topic, 1)
            await asyncio.to_thread(db.execute, "select pgmb.tick()")

        await published("calm")
        # Twenty per second, each announced by a tick. Retries are not announced.
        deadline = time.monotonic() + 30
        while (len(tries) < 2 or len(busy) < 6) and time.monotonic() < deadline:
            await published("busy")
            await asyncio.sleep(0.05)
    assert len(tries) == 2, "no retry while there was news of another queue"


async def test_a_queue_that_vanishes_at_the_start_spares_the_others(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, seen = pgmb.App(dsn), list[str]()
    app.on("a", queue="goes")(lambda payload: seen.append("goes"))
    app.on("a", queue="stays")(lambda payload: seen.append("stays"))
    declare = declaring.Declarations.declare

    async def declared(declarations: declaring.Declarations, queues: Any) -> Any:
        found = await declare(declarations, queues)
        db.execute("select pgmb.drop_queue('goes')")
        return found

    monkeypatch.setattr(declaring.Declarations, "declare", declared)
    stop = asyncio.Event()
    work = asyncio.create_task(app.work(stop))
    await until(lambda: "stays" in queue_names(db))
    db.execute("select pgmb.publish('a', '1')")
    await until(lambda: seen == ["stays"] or work.done())
    stop.set()
    await work
    assert seen == ["stays"]


async def test_a_queue_that_vanishes_spares_the_others(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("a")
    async def stays(payload: Any) -> None:
        seen.append("stays")

    @app.on("a", queue="goes")
    async def goes(payload: Any) -> None:
        seen.append("goes")

    async with working(app) as broker:
        db.execute("select pgmb.drop_queue('goes')")
        await until(lambda: "queue 'goes' does not exist" in caplog.text)
        await broker.publish("a", 1)
        await until(lambda: seen == ["stays"])
        # And back again.
        await broker.create_queue("goes", ["a"])
        await broker.publish("a", 1)
        await until(lambda: sorted(seen) == ["goes", "stays", "stays"])


async def test_a_poll_without_an_answer_is_soon_repeated(
    dsn: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncDeadline, "FIRST_SECONDS", 0.5)
    with StallingProxy(dsn) as proxy:
        app, seen = pgmb.App(proxy.dsn), list[int]()
        # The server may have leased the second event to a poll that had no answer, or have missed the first
        # ack: these come again when their leases expire.
        app.on("a", queue="a")(seen.append)
        app.queue("a", lease_for=3)
        async with working(app) as broker, await pgmb.aconnect(dsn) as direct:
            await broker.publish("a", 1)
            await until(lambda: seen == [1])
            proxy.stall()
            await direct.publish("a", 2)
            await until(lambda: 2 in seen)
    pauses = re.findall(r"cannot receive: .*?retrying in ([\d.]+) s", caplog.text, re.DOTALL)
    assert pauses[0] == "0.1"


async def test_a_queue_that_is_being_moved_holds_up_no_other_queue(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = pgmb.App(dsn, listen=False), list[str]()
    for name in ("a", "b"):
        app.on(name, queue=name)(lambda event, name=name: seen.append(name))
    async with working(app) as broker:
        # Both queues are at rest.
        await asyncio.sleep(0.3)
        with psycopg.connect(dsn) as admin:
            admin.execute("select pgmb.seek('a', pgmb.position())")
            await broker.publish("a", 1)
            await broker.publish("b", 1)
            await until(lambda: seen == ["b"])
            await broker.publish("b", 2)
            await until(lambda: seen == ["b", "b"])
            await until(lambda: "queue a: cannot receive" in caplog.text)
            # Another receive fails meanwhile.
            await asyncio.sleep(1.5)
        await until(partial(_last, seen, "a"))
    assert caplog.text.count("cannot receive") == 1


async def test_a_worker_of_a_dropped_queue_asks_less_and_less_often_and_says_so_once(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = pgmb.App(dsn), list[int]()
    app.on("a", queue="gone")(seen.append)
    with caplog.at_level(logging.DEBUG, "pgmb.app"):
        async with working(app) as broker:
            db.execute("select pgmb.drop_queue('gone')")
            failed = r"queue gone: (cannot receive: .*?); retrying in ([0-9.]+) s"

            def attempts(level: int) -> list[tuple[str, str]]:
                said = "\n".join(one.getMessage() for one in caplog.records if one.levelno >= level)
                return re.findall(failed, said)

            await until(lambda: "0.8" in [pause for _, pause in attempts(logging.DEBUG)])
            warned = [text for text, _ in attempts(logging.WARNING)]
            assert 0 < len(warned) == len(set(warned)) < len(attempts(logging.DEBUG))
            db.execute("select pgmb.create_queue('gone', '{a}')")
            await broker.publish("a", 1)
            await until(lambda: seen == [1])
    assert "queue gone: receiving again" in caplog.text
