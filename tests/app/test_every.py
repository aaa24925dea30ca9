"""An app's schedules: declared with it, published while it works."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import psycopg
import pytest

import pgmb
from harness.waiting import until
from pgmb import doctor
from pgmb.app import scheduling
from tests.app.stage import working


async def test_what_is_due_is_handled_by_the_app(dsn: str) -> None:
    app = pgmb.App(dsn)
    got: list[dict[str, int]] = []

    @app.on("clock.*")
    async def clock(payload: dict[str, int]) -> None:
        got.append(payload)

    app.every("* * * * * *", "clock.tick", {"n": 1})
    async with working(app):
        await until(lambda: len(got) >= 2)
    assert got[0] == {"n": 1}
    with pgmb.connect(dsn) as broker:
        (schedule,) = broker.schedules()
    assert (schedule.name, schedule.cron) == ("clock.tick", "* * * * * *")
    assert schedule.last_at is not None


def test_a_schedule_is_read_when_it_is_declared() -> None:
    app = pgmb.App("")
    with pytest.raises(pgmb.InvalidArgument, match="not a cron expression"):
        app.every("soon", "t")
    with pytest.raises(pgmb.InvalidArgument, match="not a time zone"):
        app.every("* * * * *", "t", timezone="Mars/Phobos")
    app.every("* * * * *", "t")
    app.every("* * * * *", "t")
    with pytest.raises(pgmb.InvalidArgument, match="another schedule 't'"):
        app.every("*/2 * * * *", "t")
    app.every("*/2 * * * *", "t", name="second")
    assert list(app.schedules) == ["t", "second"]


async def test_a_role_that_may_not_leaves_schedules_as_they_are(
    dsn: str, db: psycopg.Connection[object], caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("select pgmb.create_queue('clock', '{clock.*}')")
    app = pgmb.App(dsn, options="-c role=pgmb_consumer")

    @app.on("clock.*", queue="clock")
    async def clock(payload: object) -> None: ...

    app.every("* * * * *", "clock.tick")
    async with working(app):
        await until(lambda: "using the existing schedules" in caplog.text)
    assert db.execute("select count(*) from pgmb.schedule").fetchone() == (0,)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that waits for other workers is tried again at once, not with the next heartbeat."""
    monkeypatch.setattr(scheduling, "_AGAIN_EVERY_SECONDS", 0.05)


def reports(dsn: str, cron: str) -> pgmb.App:
    app = pgmb.App(dsn)

    @app.on("report.*", queue="reports")
    async def report(payload: object) -> None: ...

    app.every(cron, "report.due", {"cron": cron})
    return app


def named(dsn: str, name: str) -> pgmb.App:
    app = pgmb.App(dsn, name=name)

    @app.on(f"{name}.*", queue=name)
    async def clean(payload: object) -> None: ...

    app.every("0 3 * * *", f"{name}.cleanup", name="cleanup")
    return app


async def test_an_app_takes_no_schedule_of_another_app_that_starts_again(
    dsn: str, db: psycopg.Connection[Any], soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    def topics() -> list[Any]:
        return [topic for (topic,) in db.execute("select topic from pgmb.schedules()").fetchall()]

    async with working(named(dsn, "crm")):
        pass
    async with working(named(dsn, "shop")):
        assert "schedule cleanup belongs to app 'crm', and this is app 'shop'" in caplog.text
        async with working(named(dsn, "crm")):
            # Both have tried again by now.
            await asyncio.sleep(0.2)
            assert topics() == ["crm.cleanup"]
        found = [one.message for one in doctor.examine(db, doctor.Limits()) if one.check == "schedules"]
        assert any("belongs to app crm, and shop declares one of that name" in one for one in found)
        db.execute("select pgmb.drop_schedule('cleanup')")
        await until(lambda: topics() == ["shop.cleanup"])


def present(db: psycopg.Connection[Any]) -> Any:
    ((cron, payload),) = db.execute("select cron, payload from pgmb.schedules()").fetchall()
    return cron, payload["cron"]


async def test_an_old_worker_that_starts_again_takes_no_schedule_back(
    dsn: str, db: psycopg.Connection[Any], soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = "0 3 * * *", "0 4 * * *"
    async with contextlib.AsyncExitStack() as deployed:
        async with working(reports(dsn, old)):
            await deployed.enter_async_context(working(reports(dsn, new)))
            assert "schedules report.due: live workers declare them otherwise" in caplog.text
            assert present(db) == (old, old)
        await until(lambda: present(db) == (new, new))
        async with working(reports(dsn, old)):
            assert present(db) == (new, new)
        assert present(db) == (new, new)
    async with working(reports(dsn, old)):
        assert present(db) == (old, old), "no other code is at work: a deploy was taken back"
