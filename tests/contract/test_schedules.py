"""A schedule publishes each of its due times once, by the database's clock, however many Schedulers run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import pgmb
from faults.log import cron as fault
from harness.clock import clocked
from harness.postgres import create_database
from harness.sessions import Sessions
from pgmb.services import SERVICES, Scheduler, serve

MINUTE = timedelta(minutes=1)


@pytest.fixture
def broker(dsn: str) -> Iterator[pgmb.Broker]:
    with pgmb.connect(dsn) as made:
        yield made


def due(db: psycopg.Connection[Any], name: str, ago: timedelta) -> datetime:
    """Sets a schedule's next due time to the whole minute so long ago."""
    row = db.execute(
        "update pgmb.schedule set next_at = date_trunc('minute', clock_timestamp()) - %s where name = %s"
        " returning next_at",
        [ago, name],
    ).fetchone()
    assert row is not None
    at: datetime = row[0]
    return at


def published(db: psycopg.Connection[Any]) -> list[datetime]:
    """The due times of the events in the log, in its order."""
    rows = db.execute("select headers ->> 'due_at' from pgmb.log_main order by seq").fetchall()
    return [datetime.fromisoformat(row[0]) for row in rows]


async def turn(dsn: str, turns: int = 1) -> float:
    async with await pgmb.aconnect(dsn) as broker:
        scheduler = Scheduler()
        pauses = [await scheduler.turn(broker) for _ in range(turns)]
    return pauses[-1]


def test_a_schedule_is_made_changed_and_dropped(broker: pgmb.Broker) -> None:
    assert broker.schedules() == []
    assert broker.create_schedule(
        "nightly", "30 3 * * *", "report.run", {"kind": "full"}, timezone="Europe/Berlin", headers={"a": 1}
    )
    (made,) = broker.schedules()
    assert (made.cron, made.timezone, made.topic, made.payload, made.headers, made.missed) == (
        "30 3 * * *", "Europe/Berlin", "report.run", {"kind": "full"}, {"a": 1}, "last",
    )  # fmt: skip
    assert made.next_at is not None
    assert made.next_at.minute == 30
    assert (made.last_at, made.paused_at) == (None, None)
    assert not broker.create_schedule("nightly", "45 3 * * *", "report.run", key="k", missed="all")
    (changed,) = broker.schedules()
    assert (changed.cron, changed.timezone, changed.key, changed.payload) == ("45 3 * * *", "UTC", "k", None)
    assert changed.next_at is not None
    assert changed.next_at.minute == 45
    assert broker.drop_schedule("nightly")
    assert not broker.drop_schedule("nightly")


def test_the_same_definition_again_loses_no_due_time(
    broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    """Programs say it at every start."""
    broker.create_schedule("s", "* * * * *", "t", 1)
    at = due(db, "s", 5 * MINUTE)
    assert not broker.create_schedule("s", "* * * * *", "t", 1)
    assert not broker.create_schedule("s", "* * * * *", "t", 2)
    (kept,) = broker.schedules()
    assert (kept.next_at, kept.payload) == (at, 2)
    broker.create_schedule("s", "*/2 * * * *", "t", 2)
    (moved,) = broker.schedules()
    assert moved.next_at is not None
    assert moved.next_at > at


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cron": "every day"}, "not a cron expression: 'every day'"),
        ({"timezone": "Berlin"}, "not a time zone: 'Berlin'"),
        ({"missed": "some"}, "invalid missed: 'some'"),
        ({"headers": [1]}, "schedule headers must be an object, got array"),
        ({"name": " x"}, "invalid schedule name"),
        ({"name": ""}, "invalid schedule name"),
    ],
)
def test_nonsense_is_refused(broker: pgmb.Broker, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(pgmb.InvalidArgument, match=message) as caught:
        broker.create_schedule(**{"name": "s", "cron": "* * * * *", "topic": "t", **changed})
    assert caught.value.hint
    assert broker.schedules() == []


def test_what_does_not_exist_is_not_found(broker: pgmb.Broker) -> None:
    for call in (broker.pause_schedule, broker.resume_schedule, broker.run_schedule):
        with pytest.raises(pgmb.errors.ScheduleNotFound, match="schedule 'none' does not exist"):
            call("none")
    with pytest.raises(pgmb.errors.StreamNotFound):
        broker.create_schedule("s", "* * * * *", "t", stream="none")


def test_a_stream_that_schedules_publish_to_is_not_dropped(broker: pgmb.Broker) -> None:
    broker.create_stream("other")
    broker.create_schedule("s", "* * * * *", "t", stream="other")
    with pytest.raises(pgmb.Conflict, match="schedules still publish"):
        broker.drop_stream("other")
    broker.drop_schedule("s")
    broker.drop_stream("other")


async def test_the_event_carries_the_schedule_and_its_due_time(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_queue("q")
    broker.create_schedule("s", "* * * * *", "t", {"a": 1}, key="k", headers={"tenant": 7, "due_at": "x"})
    at = due(db, "s", timedelta(0))
    assert await turn(dsn) <= 1
    (event,) = broker.receive("q")
    assert (event.topic, event.payload, event.key) == ("t", {"a": 1}, "k")
    assert event.headers == {
        "tenant": 7,
        "schedule": "s",
        "due_at": at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    (schedule,) = broker.schedules()
    assert schedule.last_at == at
    assert schedule.next_at is not None
    assert schedule.next_at - at in (MINUTE, 2 * MINUTE)


async def test_of_missed_times_the_last_is_published(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "* * * * *", "t")
    at = due(db, "s", timedelta(days=3))
    await turn(dsn, 2)
    (one, *_) = published(db)
    assert one > at + timedelta(days=3) - 2 * MINUTE
    assert len(published(db)) <= 2, "one, unless a minute has passed"


async def test_or_all_of_them_in_their_order(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "* * * * *", "t", missed="all")
    at = due(db, "s", timedelta(minutes=249))
    await turn(dsn, 4)
    got = published(db)
    assert got == [at + n * MINUTE for n in range(len(got))]
    assert len(got) >= 250


async def test_nothing_is_published_before_its_time(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "0 0 1 1 *", "t")
    assert await turn(dsn) == 1.0
    (schedule,) = broker.schedules()
    assert schedule.next_at is not None
    assert broker.fire("s", schedule.next_at, schedule.next_at + MINUTE) is None
    with pytest.raises(pgmb.InvalidArgument, match="moves on"):
        broker.fire("s", schedule.next_at, schedule.next_at)
    assert published(db) == []


async def test_what_never_falls_due_again_rests(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "* * * * *", "t")
    at = due(db, "s", MINUTE)
    assert broker.fire("s", at, None) is not None
    assert broker.schedules()[0].next_at is None
    assert await turn(dsn, 3) == 1.0
    assert len(published(db)) == 1


def test_a_schedule_runs_now_and_stays_as_it_is(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.create_schedule("s", "0 3 * * *", "t", {"a": 1}, key="k", headers={"x": "y"})
    broker.pause_schedule("s")
    before = broker.schedules()
    event = broker.run_schedule("s")
    found = db.execute("select topic, payload, key, headers, published_at from pgmb.log_main").fetchall()
    ((topic, payload, key, headers, published_at),) = found
    assert (topic, payload, key) == ("t", {"a": 1}, "k")
    assert (headers["schedule"], headers["x"]) == ("s", "y")
    assert abs(datetime.fromisoformat(headers["due_at"]) - published_at) < MINUTE
    assert broker.event_fate(event).topic == "t"
    assert broker.schedules() == before


async def test_a_paused_schedule_is_silent_and_makes_up_for_nothing(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "0 0 1 1 *", "t", missed="all")
    broker.pause_schedule("s")
    at = due(db, "s", timedelta(days=1000))
    await turn(dsn)
    assert broker.fire("s", at, at + MINUTE) is None
    assert broker.schedules()[0].paused_at is not None
    broker.resume_schedule("s")
    await turn(dsn)
    assert published(db) == []
    (schedule,) = broker.schedules()
    assert schedule.paused_at is None
    assert schedule.next_at is not None
    assert schedule.next_at > datetime.now(UTC)


async def test_one_that_fails_does_not_hold_up_the_others(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        broker.create_schedule(name, "* * * * *", name)
        due(db, name, 3 * MINUTE)
    db.execute("update pgmb.schedule set timezone = 'Mars/Phobos' where name = 'a'")
    db.execute("update pgmb.schedule set stream = 'none' where name = 'b'")
    await turn(dsn)
    assert db.execute("select distinct topic from pgmb.log_main").fetchall() == [("c",)]
    assert "Mars/Phobos" in caplog.text
    assert "stream 'none' does not exist" in caplog.text
    db.execute("update pgmb.schedule set timezone = 'UTC', stream = 'main'")
    await turn(dsn)
    assert {row[0] for row in db.execute("select topic from pgmb.log_main")} == {"a", "b", "c"}


def test_of_two_that_fire_at_once_one_publishes(
    broker: pgmb.Broker, db: psycopg.Connection[Any], sessions: Sessions
) -> None:
    broker.create_schedule("s", "* * * * *", "t")
    at = due(db, "s", MINUTE)
    fire = "select pgmb.fire('s', %s, %s)"
    one, two, three = sessions.open("one", "two", "three")
    one.run("begin")
    assert one.value(fire, [at, at + MINUTE]) is not None
    waiting = two.start(fire, [at, at + MINUTE]).blocked()
    one.run("rollback")
    ((second,),) = waiting.result()
    assert second is not None, "the first did not commit"
    assert three.value(fire, [at, at + MINUTE]) is None
    assert len(published(db)) == 1


async def test_many_schedulers_publish_each_due_time_once(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_schedule("s", "* * * * *", "t", missed="all")
    at = due(db, "s", timedelta(minutes=59))
    stop = asyncio.Event()
    async with await pgmb.aconnect(dsn) as shared, asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(serve(shared, [Scheduler(every=0.01) for _ in range(8)], stop))
        while len(published(db)) < 60:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stop.set()
    got = published(db)
    assert got == [at + n * MINUTE for n in range(len(got))]


def test_an_idle_scheduler_writes_nothing(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.create_schedule("s", "0 0 1 1 *", "t")
    with db.transaction():
        assert broker.due_schedules(1, conn=db) == []
        assert db.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_serve_runs_it() -> None:
    assert SERVICES["scheduler"] is Scheduler


@pytest.mark.slow
def test_processes_killed_while_the_clock_crosses_due_times(
    pg_major: int, install: Any, tmp_path: Path
) -> None:
    with clocked(pg_major) as (server, clock):
        dsn = server.dsn(create_database(server))
        install(dsn)
        result = fault.run(
            dsn, clock, tmp_path, due_times=20, processes=3, kills=2, pace=0.1, seed=random.randrange(1 << 30)
        )
    assert result.holds, str(result)


def test_a_schedule_waits_for_its_own_app_and_for_no_other(db: psycopg.Connection[Any]) -> None:
    def agreed(app: str | None, says: str) -> Any:
        worker = uuid4()
        db.execute("select pgmb.worker_heartbeat(%s, 'h', 1, '{}', app => %s)", [worker, app])
        told = [worker, f'{{"s": "{says}"}}']
        return db.execute("select pgmb.declare_schedules(%s, %s) = '{s}'", told).fetchone()

    def create(app: str | None) -> None:
        db.execute("select pgmb.create_schedule('s', '0 3 * * *', 't', '1', now(), app => %s)", [app])

    def owner() -> Any:
        return db.execute("select app, others from pgmb.schedules()").fetchone()

    create(None)
    assert agreed("crm", "old") == (True,), "no app owns it"
    create("crm")
    create("shop")
    create(None)
    assert owner() == ("crm", [])
    assert agreed("shop", "other") == (False,)
    assert owner() == ("crm", ["shop"])
    db.execute("update pgmb.worker set heartbeat_at = now() - interval '1 minute' where app = 'crm'")
    assert agreed("crm", "new") == (True,), "what shop declares does not count"
    assert agreed("crm", "newer") == (False,), "another worker of the app declares otherwise"
