"""An app's schedules: declared with it, published while it works."""

from __future__ import annotations

import psycopg
import pytest

import pgmb
from harness.waiting import until
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
