"""The services keep the log in order without blocking publishers or consumers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

import pgmb
from harness.sessions import Sessions
from harness.states import age_leases, kept_claims
from pgmb._async.listener import AsyncListener
from pgmb.services import (
    Dispatcher,
    Http,
    HttpSettings,
    Janitor,
    Leadership,
    Scheduler,
    Service,
    Ticker,
    serve,
)
from pgmb.services import service as service_module
from pgmb.services.leadership import ELECTED
from pgmb.services.service import ClosableService
from tests.contract.cast import Cast


def emptied(db: psycopg.Connection[Any], number: int = 1) -> list[str]:
    """Segments that retention has emptied, and their tables with them."""
    db.execute("select pgmb.publish('a', '1')")
    db.execute("select pgmb.rotate()")
    db.execute("update pgmb.segment set dropped_at = now() - interval '1 hour' where number < %s", [number])
    return tables(db)


def tables(db: psycopg.Connection[Any]) -> list[str]:
    return [
        row[0]
        for row in db.execute(
            "select relname from pg_class where relname ~ '^segment_\\d+_\\d+$' order by 1"
        ).fetchall()
    ]


async def test_the_janitor_removes_what_retention_emptied(dsn: str, db: psycopg.Connection[Any]) -> None:
    before = emptied(db)
    async with await pgmb.aconnect(dsn) as broker:
        assert await Janitor().remove_emptied(broker) == 1
        assert await Janitor().remove_emptied(broker) == 0
        await broker.publish("a", 2)
    assert tables(db) == before[1:]


@pytest.mark.parametrize(("patience", "cancel_after"), [(0.5, "0"), (20.0, "500ms")])
async def test_a_detach_that_waits_is_finished_later_and_blocks_no_publisher(
    dsn: str, db: psycopg.Connection[Any], sessions: Sessions, patience: float, cancel_after: str
) -> None:
    """Its wait ends by the janitor's patience or by the role's statement_timeout."""
    before = emptied(db)
    sessions["slow"].run("begin; select pgmb.publish('a', '2')")
    async with await pgmb.aconnect(dsn, options=f"-c statement_timeout={cancel_after}") as broker:
        waiting = asyncio.create_task(Janitor(patience=patience).remove_emptied(broker))
        while not waiting.done():
            await broker.publish("a", 3)
            await asyncio.sleep(0.01)
        assert await waiting == 0
        assert tables(db) == before
        sessions["slow"].run("commit")
        assert await Janitor().remove_emptied(broker) == 1
        assert tables(db) == before[1:]
        assert len(await broker.between("main", await broker.earliest(), await broker.position())) > 0


async def test_a_janitor_that_is_no_owner_leaves_tables_to_maintain_and_says_so_once(
    dsn: str, db: psycopg.Connection[Any], cast: Cast, caplog: pytest.LogCaptureFixture
) -> None:
    before = emptied(db)
    caplog.set_level(logging.INFO, "pgmb.services")
    janitor = Janitor()
    async with await pgmb.aconnect(dsn, user=cast.role("admin", "pgmb_admin")) as broker:
        for _ in range(2):
            assert await janitor.remove_emptied(broker) == 0
        assert tables(db) == before
        await janitor.turn(broker)
    assert len(tables(db)) == len(before) - 1
    assert caplog.text.count("does not own schema pgmb: maintain() drops the tables of emptied segments") == 1


async def test_every_service_runs_with_the_rights_of_pgmb_admin_alone(
    dsn: str, db: psycopg.Connection[Any], cast: Cast, caplog: pytest.LogCaptureFixture
) -> None:
    emptied(db)
    db.execute("select pgmb.create_stream('other'), pgmb.create_queue('q', '{#}')")
    db.execute("select pgmb.create_endpoint('crm', 'https://crm.example/', '{ordered}')")
    db.execute("select pgmb.create_schedule('hourly', '0 * * * *', 'fired', '1', now() - interval '1 hour')")
    leadership = Leadership(ELECTED, "test")
    services: list[Service] = [leadership, Ticker(), Janitor(), Scheduler(), Dispatcher()]
    async with await pgmb.aconnect(dsn, user=cast.role("admin", "pgmb_admin")) as broker:
        for service in services:
            await service.turn(broker)
            if isinstance(service, ClosableService):
                await service.close(broker)
    assert set(await ticks(db)) == {"main", "other"}
    assert db.execute("select count(*) from pgmb.log_main where topic = 'fired'").fetchone() == (1,)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


OWNERS_ONLY = {("janitor.py", "segment"), ("janitor.py", "stream")}
"""The janitor reads them only as the owner."""


def test_services_name_only_relations_that_pgmb_admin_may_read(db: psycopg.Connection[Any]) -> None:
    package = Path(pgmb.__file__).parent
    # Not the log of a stream: its readers are granted it.
    relation = re.compile(r"\b(?:from|join|into|update) pgmb\.(?!log_)(\w+)\b(?! import|[.(])")
    named = {
        (file.name, name)
        for part in ("app", "server", "services", "webhooks")
        for file in (package / part).rglob("*.py")
        for name in relation.findall(file.read_text())
    }
    assert named > OWNERS_ONLY
    granted = "select has_any_column_privilege('pgmb_admin', format('pgmb.%%I', %s::text), 'select')"
    denied = {(file, name) for file, name in named if db.execute(granted, [name]).fetchone() != (True,)}
    assert denied == OWNERS_ONLY


async def test_a_listener_ticks_with_the_rights_of_pgmb_admin_alone(dsn: str, cast: Cast) -> None:
    listener = AsyncListener(dsn, user=cast.role("admin", "pgmb_admin"))
    subscription = listener.subscribe("main")
    try:
        await listener.start()
        assert subscription.healthy
    finally:
        await listener.close()


async def test_the_janitor_rotates_and_clears(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.alter_stream("main", rotate_events=5)
        await broker.create_queue("q")
        for n in range(3):
            await broker.publish_many("a", [n] * 5)
            await (await broker.receive("q")).ack()
            await Janitor().turn(broker)
        (stream,) = await broker.stream_status()
        assert stream.segments == 4
        age_leases(db)
        await Janitor().turn(broker)
        assert kept_claims(db) == 1


async def ticks(db: psycopg.Connection[Any]) -> list[str]:
    """The stream of each tick, in the order in which they were made."""
    rows = db.execute("select s.name from pgmb.tick t join pgmb.stream s on s.id = t.stream order by t.at")
    return [name for (name,) in rows.fetchall()]


async def test_the_ticker_ticks_streams_that_moved(dsn: str, db: psycopg.Connection[Any]) -> None:
    now = 100.0
    ticker = Ticker(every=0.06, all_every=60, clock=lambda: now)
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_stream("other")
        assert await ticker.turn(broker) == 0.06
        made = await ticks(db)
        assert sorted(made) == ["main", "other"], "what was never ticked has no position yet"
        await ticker.turn(broker)
        assert await ticks(db) == made
        await broker.publish("a", 1, stream="other")
        await ticker.turn(broker)
        assert await ticks(db) == [*made, "other"]
        assert await broker.tick("main") is None
        assert await broker.tick("other") is None
        now += 2
        assert 0.06 < await ticker.turn(broker) < 0.1
        now += 20
        assert await ticker.turn(broker) > 0.1


async def test_the_ticker_finds_a_late_commit_on_a_stream_at_rest(dsn: str, sessions: Sessions) -> None:
    ticker = Ticker(all_every=3600)
    async with await pgmb.aconnect(dsn) as broker:
        sessions["late"].run("begin; select pgmb.publish('a', '1')")
        await ticker.turn(broker)
        before = await broker.position()
        sessions["late"].run("commit")
        await ticker.turn(broker)
        assert await broker.tick() is None
        assert len(await broker.between("main", before, await broker.position())) == 1


async def test_the_ticker_looks_once_at_transactions_that_published_nothing(
    dsn: str, sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    ticker = Ticker(all_every=3600)
    async with await pgmb.aconnect(dsn) as broker:
        sessions["open"].run("begin; select pg_current_xact_id()")
        await broker.publish("a", 1)
        await ticker.turn(broker)
        sessions["open"].run("commit")
        made = await ticks(db)
        calls: list[str] = []
        tick = broker.tick

        async def counted(stream: str) -> int | None:
            calls.append(stream)
            return await tick(stream)

        broker.tick = counted  # type: ignore[method-assign,assignment]
        for _ in range(3):
            await ticker.turn(broker)
        assert calls == ["main"]
        assert await ticks(db) == made


async def test_the_ticker_publishes_what_is_due(dsn: str, db: psycopg.Connection[Any]) -> None:
    ticker = Ticker(all_every=3600)
    async with await pgmb.aconnect(dsn) as broker:
        await ticker.turn(broker)
        await broker.publish("a", 1, delay=3600)
        await ticker.turn(broker)
        assert db.execute("select count(*) from pgmb.delayed").fetchone() == (1,)
        db.execute("update pgmb.delayed set due_at = clock_timestamp()")
        await ticker.turn(broker)
        assert db.execute("select count(*) from pgmb.delayed").fetchone() == (0,)


async def ticked(db: psycopg.Connection[Any]) -> None:
    while db.execute("select count(*) from pgmb.tick").fetchone() == (0,):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_roles_outlive_a_lost_connection(dsn: str, db: psycopg.Connection[Any]) -> None:
    stop = asyncio.Event()
    async with await pgmb.aconnect(dsn, application_name="service") as broker:
        running = asyncio.create_task(serve(broker, [Ticker(), Janitor(every=0.05)], stop))
        await broker.publish("a", 1)
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'service'"
        )
        # Every connection that the pool still held is lost, and found to be, one by one.
        for _ in range(10):
            with contextlib.suppress(psycopg.OperationalError):
                await broker.publish("a", 2)
        await asyncio.wait_for(ticked(db), 20)
        stop.set()
        await running


class Failing:
    """Fails unexpectedly some times, then works."""

    name = "failing"

    def __init__(self, times: int) -> None:
        self.times = times
        self.turns = 0
        self.closed = 0

    async def turn(self, _: pgmb.AsyncBroker) -> float:
        self.turns += 1
        if self.turns <= self.times:
            raise LookupError(f"attempt {self.turns}")
        return 0.01

    async def close(self, _: pgmb.AsyncBroker) -> None:
        self.closed += 1


async def test_an_unexpected_error_is_logged_at_once_and_restarts_its_service_alone(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_FIRST_PAUSE_SECONDS", 0.01)
    stop, failing, beside = asyncio.Event(), Failing(3), Failing(0)
    async with await pgmb.aconnect(dsn) as broker, asyncio.timeout(30):
        running = asyncio.create_task(serve(broker, [failing, beside], stop))
        while failing.turns < 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "failing: unexpected error; starting it again" in caplog.text
        while failing.turns < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (failing.closed, beside.closed) == (3, 0)
        assert beside.turns > 0
        stop.set()
        await running
    assert "LookupError: attempt 3" in caplog.text


async def test_a_service_that_fails_again_and_again_ends_all(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_FIRST_PAUSE_SECONDS", 0.0)
    failing, beside = Failing(1000), Failing(0)
    async with await pgmb.aconnect(dsn) as broker, asyncio.timeout(30):
        with pytest.raises(LookupError):
            await serve(broker, [failing, beside], asyncio.Event())
    assert beside.closed == 1
    assert "giving up" in caplog.text


async def test_http_serves_again_on_its_port_after_an_error(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_FIRST_PAUSE_SECONDS", 0.01)
    stop, http = asyncio.Event(), Http(dsn, HttpSettings(port=0, finish_within=0.2))
    url = http.bind()
    async with await pgmb.aconnect(dsn) as broker, asyncio.timeout(30):
        running = asyncio.create_task(serve(broker, [http], stop))
        for _ in range(2):
            async with httpx.AsyncClient(timeout=20) as client:
                assert (await client.get(f"{url}/livez")).status_code == 200
            (serving,) = [task for task in asyncio.all_tasks() if task.get_name() == "http server"]
            serving.cancel()
            await asyncio.wait([serving])
        stop.set()
        await running
