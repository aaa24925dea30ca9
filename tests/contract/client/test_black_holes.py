"""Connections that die without a word: what waits on them gets an error, and work goes on with new ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgmb
from harness.stalling import StallingProxy
from harness.states import queue_names
from pgmb._async import pool
from pgmb._async.listener import AsyncListener
from pgmb._core.concurrency import AsyncDeadline
from pgmb._core.connecting import DEFAULTS, connect
from pgmb.app import App
from pgmb.app.running import work
from pgmb.services import Dispatcher, Janitor, Scheduler, Service, Ticker, Turns, serve


@pytest.fixture
def proxy(dsn: str) -> Iterator[StallingProxy]:
    with StallingProxy(dsn) as started:
        yield started


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of a fraction of a second, so that the tests need not wait for the real ones."""
    monkeypatch.setattr(AsyncDeadline, "FIRST_SECONDS", 0.3)


def count(db: psycopg.Connection[Any], statement: str) -> int:
    row = db.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_the_sockets_have_keepalives_and_a_limit_for_lost_packets(proxy: StallingProxy) -> None:
    with connect(proxy.dsn) as conn, socket.socket(fileno=os.dup(conn.fileno())) as wire:
        assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == DEFAULTS["keepalives_idle"]
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == DEFAULTS["keepalives_interval"]
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEFAULTS["tcp_user_timeout"]


async def test_services_go_on_when_their_connections_become_black_holes(
    proxy: StallingProxy, dsn: str, db: psycopg.Connection[Any]
) -> None:
    stop, turns = asyncio.Event(), Turns()
    async with await pgmb.aconnect(proxy.dsn) as broker:
        await broker.create_schedule("s", "* * * * *", "t")
        services: list[Service] = [Ticker(), Janitor(every=0.05), Scheduler(every=0.05)]
        running = asyncio.create_task(serve(broker, services, stop, turns=turns))
        db.execute("select pgmb.publish('a', '1')")
        while count(db, "select count(*) from pgmb.tick") == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        proxy.stall()
        db.execute("select pgmb.publish('a', '2'), pgmb.rotate()")
        db.execute("update pgmb.schedule set next_at = now()")
        ticks = count(db, "select max(id) from pgmb.tick")
        async with asyncio.timeout(60):
            while (  # noqa: ASYNC110
                count(db, "select max(id) from pgmb.tick") == ticks
                or count(db, "select count(*) from pgmb.segment where sealed_at is not null") == 0
                or count(db, "select count(*) from pgmb.log_main where topic = 't'") == 0
            ):
                await asyncio.sleep(0.02)
        assert turns.hung() == []
        stop.set()
        await running


async def test_a_worker_goes_on_when_its_connections_become_black_holes(
    proxy: StallingProxy, dsn: str, db: psycopg.Connection[Any]
) -> None:
    app, got = App(proxy.dsn), asyncio.Queue[int]()

    @app.on("a", queue="q")
    async def handle(payload: int) -> None:
        got.put_nowait(payload)

    stop = asyncio.Event()
    working = asyncio.create_task(work(app.work_spec(), stop))
    while not queue_names(db):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    db.execute("select pgmb.publish('a', '1')")
    assert await asyncio.wait_for(got.get(), 60) == 1
    proxy.stall()
    async with asyncio.timeout(60):
        # A lease whose answer was lost comes again when it expires. Later events do not wait for it.
        while got.empty():
            db.execute("select pgmb.publish('a', '2')")
            await asyncio.sleep(0.05)
    stop.set()
    await working


async def test_a_listener_goes_on_when_its_connection_becomes_a_black_hole(
    proxy: StallingProxy, db: psycopg.Connection[Any]
) -> None:
    # Nothing else ends such a connection here: the proxy confirms every packet.
    async with AsyncListener(proxy.dsn, tick_every=0.05) as listener:
        subscription = listener.subscribe()
        async with asyncio.timeout(60):
            while not listener.ticking:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            proxy.stall()
            ticks = count(db, "select count(*) from pgmb.tick")
            db.execute("select pgmb.publish('a', '1')")
            while count(db, "select count(*) from pgmb.tick") == ticks:
                await subscription.wait(0.1)


async def test_a_deadline_follows_a_server_that_is_only_slow(dsn: str) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        deadline = AsyncDeadline("slow", broker.break_off)
        attempts = 0
        for _ in range(10):
            attempts += 1
            with contextlib.suppress(psycopg.OperationalError), deadline.enforced():
                async with broker.connection() as conn:
                    await conn.execute("select pg_sleep(0.7)")
                    break
        assert 1 < attempts < 10
        assert deadline.seconds > 1


async def test_a_deadline_does_not_count_the_wait_for_a_connection(dsn: str) -> None:
    """After an outage, an answer that was on its way would be thrown away, and a lease with it."""
    async with await pgmb.aconnect(dsn, max_size=1) as broker:
        deadline = AsyncDeadline("waiting", broker.break_off, 2.0)

        async def call() -> None:
            with deadline.enforced():
                async with broker.connection() as conn:
                    await conn.execute("select pg_sleep(1)")

        async with broker.connection():
            waiting = asyncio.create_task(call())
            await asyncio.sleep(1.5)
        await waiting


def test_a_turn_that_outlives_its_deadline_is_hung_and_one_that_fails_is_not() -> None:
    now = 0.0
    turns = Turns(clock=lambda: now)
    turns.begin("ticker", 4.0)
    turns.begin("janitor", 60.0)
    now = 50.0
    assert turns.hung() == ["ticker"]
    turns.end("ticker")
    assert turns.hung() == []


async def test_livez_names_a_hung_service(dsn: str) -> None:
    from pgmb.server import create_app
    from tests.server.asking import asking

    hung: list[str] = []
    async with asking(create_app(dsn, hung=lambda: hung)) as client:
        assert (await client.get("/livez")).status_code == 200
        hung.append("ticker")
        answer = await client.get("/livez")
        assert (answer.status_code, answer.text) == (503, "no progress: ticker\n")
        ready = (await client.get("/readyz")).json()
        assert ready["checks"]["services"] == {"ok": False, "detail": "no progress: ticker"}


async def test_services_end_in_time_when_nothing_answers_any_more(proxy: StallingProxy) -> None:
    stop = asyncio.Event()
    services: list[Service] = [Ticker(), Janitor(every=0.0), Scheduler(every=0.0), Dispatcher()]
    async with await pgmb.aconnect(proxy.dsn, max_size=5, max_wait=0.5, connect_timeout=1) as broker:
        running = asyncio.create_task(serve(broker, services, stop, grace=0.2))
        while proxy.connections < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # Later connections get no answer either: there is nothing to go on with.
        proxy.stall(accepting=False)
        await asyncio.sleep(0)
        stop.set()
        await asyncio.wait_for(running, 60)


async def test_a_call_that_waits_through_an_outage_is_served_soon_after_it(
    proxy: StallingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool gives up reconnecting again and again meanwhile; psycopg's own pauses double without limit."""
    monkeypatch.setattr(pool, "_RECONNECT_SECONDS", 0.1)
    async with await pgmb.aconnect(proxy.dsn, max_wait=60) as broker:
        await broker.publish("a", 1)
        proxy.cut()
        waiting = asyncio.create_task(broker.publish("a", 2))
        # Each time that it gives up it has tried twice or thrice.
        async with asyncio.timeout(30):
            while (proxy.refused or 0) < 12:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert not waiting.done()
            proxy.restore()
            await waiting


def test_a_pool_hands_out_no_connection_that_the_server_has_closed(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    with pgmb.connect(make_conninfo(dsn, application_name="restarted"), min_size=5) as broker:
        broker._pool.wait()
        ended = (
            "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity where application_name = "
        )
        assert count(db, ended + "'restarted'") >= 5
        for number in range(10):
            broker.publish("a", number)


def test_a_broken_connection_takes_the_idle_ones_of_its_pool_along(proxy: StallingProxy) -> None:
    """Those that died with it would each fail a call, after the whole wait."""
    with pgmb.connect(proxy.dsn, min_size=5) as broker:
        broker._pool.wait()
        proxy.stall()
        thread = threading.current_thread()
        threading.Timer(0.3, broker.break_off, [thread]).start()
        with pytest.raises(psycopg.OperationalError):
            broker.publish("a", 1)
        for number in range(10):
            broker.publish("a", number)


def test_a_program_that_closes_nothing_ends_while_it_connects() -> None:
    """Nobody answers here; the task that connects is cancelled in the midst of it, at the end of the loop."""

    async def program(hole: socket.socket) -> None:
        address = f"host=127.0.0.1 port={hole.getsockname()[1]} dbname=x"
        await pool.AsyncBrokerPool(address, {}).open()
        met, _ = await asyncio.get_running_loop().sock_accept(hole)
        accepted.append(met)

    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as hole:
        hole.setblocking(False)
        running = threading.Thread(target=asyncio.run, args=[program(hole)], daemon=True)
        running.start()
        running.join(60)
        assert not running.is_alive()
        accepted[0].close()
