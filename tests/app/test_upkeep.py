"""`pgmb work` alone: a process beside the handlers keeps the log in order, and no handler can hold it up."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgmb
from harness import processes
from harness.waiting import until, until_true
from pgmb.services import Janitor, Leadership, serve
from pgmb.services import supervisor as supervision
from tests.app.stage import Workers

BLOCKING = """
    import time, pgmb

    app = pgmb.App(DSN)

    @app.on("block", queue="q")
    async def block(seconds: float) -> None:
        print("blocked", flush=True)
        # Neither the event loop nor, in C, another thread would run meanwhile.
        time.sleep(seconds)
"""


def dropped(db: psycopg.Connection[Any], stream: str) -> list[int]:
    """The segments that retention has emptied."""
    rows = db.execute(
        "select g.number from pgmb.segment g join pgmb.stream s on s.id = g.stream"
        " where s.name = %s and g.dropped_at is not null",
        [stream],
    )
    return [number for (number,) in rows]


def upkeep_of(dsn: str) -> int | None:
    """The process that leads the upkeep."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("select distinct pid from pgmb.describe_leaders() where alive").fetchall()
    return rows[0][0] if rows else None


def test_segments_are_dropped_and_schedules_fire_beside_a_handler_that_blocks(
    dsn: str, tmp_path: Path, db: psycopg.Connection[Any]
) -> None:
    workers = Workers(tmp_path, dsn, BLOCKING)
    with pgmb.connect(dsn, max_size=1) as broker, workers.running(services=True) as parent:
        until_true(lambda: "working on q" in workers.logged())
        broker.publish("block", 600)
        until_true(lambda: "blocked" in workers.logged())
        broker.create_stream("log", rotate_every=1, keep_for=0.5)
        broker.create_schedule("each second", "* * * * * *", "fired", stream="log")
        # A segment with events was rotated, sealed, and dropped; and one with younger events is there.
        until_true(lambda: len(dropped(db, "log")) > 0)
        (status,) = [one for one in broker.stream_status() if one.stream == "log"]
        assert status.last_tick_age is not None
        parent.terminate()
        until_true(lambda: "waiting for running handlers to finish" in workers.logged())
        # Handlers end first: until then the upkeep goes on.
        assert upkeep_of(dsn) is not None
        parent.send_signal(signal.SIGINT)
        assert parent.wait(20) == 128 + signal.SIGINT
    until_true(lambda: upkeep_of(dsn) is None)


def test_a_killed_upkeep_process_is_replaced_and_ends_with_its_parent(dsn: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, dsn, BLOCKING)
    with workers.running(services=True) as parent:
        until_true(lambda: upkeep_of(dsn) is not None)
        killed = upkeep_of(dsn)
        assert killed is not None
        psutil.Process(killed).kill()
        # Its successor need not wait until the lease has expired.
        until_true(lambda: upkeep_of(dsn) not in (None, killed))
        assert "upkeep ended (SIGKILL); restarting" in workers.logged()
        family = psutil.Process(parent.pid).children()
        assert len(family) == 2
        parent.kill()
        parent.wait()
        processes.wait_gone([child.pid for child in family], 40)


@pytest.fixture
def consumer(db: psycopg.Connection[Any]) -> Generator[str]:
    role = f"plain_{db.info.backend_pid}"
    db.execute(f"create role {role} login in role pgmb_consumer")
    yield role
    db.execute(f"drop owned by {role}")
    db.execute(f"drop role {role}")


def test_a_role_that_may_not_do_the_upkeep_is_told_once_and_its_handlers_work(
    dsn: str, tmp_path: Path, db: psycopg.Connection[Any], consumer: str
) -> None:
    workers = Workers(tmp_path, make_conninfo(dsn, user=consumer), BLOCKING)
    with pgmb.connect(dsn, max_size=1) as broker:
        broker.create_queue("q", ["block"])
        with workers.running(services=True) as parent:
            told = f"role {consumer} may not do the upkeep, which needs pgmb_admin, and no other process does"
            until_true(lambda: told in workers.logged())
            broker.publish("block", 0)
            until_true(lambda: "blocked" in workers.logged())
            until_true(lambda: len(psutil.Process(parent.pid).children()) == 1)
            parent.terminate()
            assert parent.wait(40) == 0
    assert workers.logged().count("upkeep") == 1


async def test_one_of_several_processes_leads_and_another_takes_over_when_it_ends(dsn: str) -> None:
    janitors, stops = [CountingJanitor(), CountingJanitor()], [asyncio.Event(), asyncio.Event()]
    async with (
        await pgmb.aconnect(dsn) as broker,
        asyncio.TaskGroup() as group,
    ):
        tasks = []
        for janitor, stop in zip(janitors, stops, strict=True):
            leadership = Leadership(["janitor"], "test")
            tasks.append(group.create_task(serve(broker, [janitor], stop, leadership=leadership)))
            await until(lambda: sum(one.turns for one in janitors) > 5)
        first, second = (0, 1) if janitors[0].turns else (1, 0)
        assert janitors[second].turns == 0
        stops[first].set()
        await until(lambda: janitors[second].turns > 5)
        stops[second].set()


class CountingJanitor(Janitor):
    def __init__(self) -> None:
        super().__init__(every=0.05)
        self.turns = 0

    async def turn(self, broker: pgmb.AsyncBroker) -> float:
        self.turns += 1
        return await super().turn(broker)


async def test_a_process_in_the_background_that_does_not_report_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "_SILENT_SECONDS", 0.2)
    supervisor = supervision.Supervisor()
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    supervisor.start(supervision.Child("sleeper", command, {}, background=True))
    await until(lambda: caplog.text.count("sleeper ended (SIGKILL); restarting") == 2)
    await supervisor.finish()
    assert "sleeper is silent" in caplog.text


async def test_the_janitor_tells_once_that_nothing_posts_webhooks(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    janitor = Janitor()
    db.execute("select pgmb.create_endpoint('crm', 'https://crm.example/')")
    async with await pgmb.aconnect(dsn, max_size=1) as broker:
        for _ in range(80):
            await janitor.turn(broker)
    assert caplog.text.count("no dispatcher runs: nothing posts the events of 1 endpoint.") == 1
