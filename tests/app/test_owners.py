"""Who owns a queue: old and new code, and other programs, start beside each other and lose nothing."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from types import ModuleType
from typing import Any

import psycopg
import pytest

import pgmb
from harness.stalling import StallingProxy
from harness.waiting import until
from pgmb import doctor
from pgmb.app import declaring, heartbeats
from tests.app.stage import working

Rows = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that waits for other workers is tried again at once, not with the next heartbeat."""
    monkeypatch.setattr(declaring, "_AGAIN_EVERY_SECONDS", 0.05)


def shop(
    dsn: str, *topics: str, queue: str = "q", name: str | None = None, shared: bool = False, **settings: Any
) -> tuple[pgmb.App, list[Any]]:
    """A version of a program: its app, and what it has handled."""
    app = pgmb.App(dsn, name=name, shared=shared) if name else pgmb.App(dsn)
    seen: list[Any] = []
    app.queue(queue, **settings)

    @app.on(*topics, queue=queue)
    async def notify(number: int) -> None:
        seen.append(number)

    return app, seen


def program(dsn: str, module: str, topic: str) -> tuple[pgmb.App, list[Any]]:
    """A program with a function `notify` in a module of its own."""
    app, seen = pgmb.App(dsn), list[Any]()
    there = ModuleType(module)
    there.__dict__.update(app=app, seen=seen)
    source = f"@app.on({topic!r})\nasync def notify(number: int) -> None:\n    seen.append(number)\n"
    exec(source, there.__dict__)
    return app, seen


def silent_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A worker counts itself as silent after that time, and sends heartbeats ten times as often."""
    monkeypatch.setattr(heartbeats, "SILENT_SECONDS", seconds)
    monkeypatch.setattr(heartbeats, "HEARTBEAT_EVERY_SECONDS", seconds / 10)
    monkeypatch.setattr(heartbeats, "_POLLER_SECONDS", seconds / 10)


def bound(db: psycopg.Connection[Any], queue: str = "q") -> list[str]:
    ((patterns,),) = db.execute("select patterns from pgmb.queue_status where queue = %s", [queue]).fetchall()
    return list(patterns)


def setting(db: psycopg.Connection[Any], name: str, queue: str = "q") -> Any:
    ((settings,),) = db.execute("select pgmb.queue_settings(%s)", [queue]).fetchall()
    return settings[name]


def kinds(db: psycopg.Connection[Any]) -> list[str]:
    return [kind for (kind,) in db.execute("select kind from pgmb.queue_disagreements()").fetchall()]


async def test_an_old_worker_that_restarts_beside_a_new_one_loses_no_event(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    (old, _), (new, seen) = shop(dsn, "a"), shop(dsn, "a", "b")
    async with working(new) as broker:
        for _ in range(2):
            async with working(old):
                assert bound(db) == ["a", "b"]
        await broker.publish_many("b", range(50))
        await until(lambda: sorted(seen) == list(range(50)))


async def test_two_programs_with_a_function_of_one_name_each_handle_all_their_events(dsn: str) -> None:
    (mail, mailed), (sms, sent) = program(dsn, "mail", "user.mail"), program(dsn, "sms", "user.sms")
    async with working(mail) as broker, working(sms):
        await broker.publish_many("user.mail", range(20))
        await broker.publish_many("user.sms", range(20))
        await until(lambda: sorted(mailed) == sorted(sent) == list(range(20)))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_setting_does_not_flip_when_old_and_new_workers_restart(
    dsn: str, db: psycopg.Connection[Any], seed: int
) -> None:
    chance = random.Random(seed)
    versions: dict[str, dict[str, Any]] = {
        "old": {"rps": 5, "ttl": 3600},
        "new": {"rps": 7, "filter": "$.payload > 0"},
    }
    async with AsyncExitStack() as first:
        await first.enter_async_context(working(shop(dsn, "a", **versions["old"])[0]))
        for _ in range(6):
            async with working(shop(dsn, "a", **versions[chance.choice(["old", "new"])])[0]):
                found = [setting(db, name) for name in ("rps", "ttl", "filter")]
                assert found == [5, "PT1H", None]
    async with working(shop(dsn, "a", **versions["new"])[0]):
        found = [setting(db, name) for name in ("rps", "ttl", "filter")]
        assert found == [7, None, "$.payload > 0"], "all live workers declare it alike"


async def test_a_setting_changes_once_the_workers_that_declare_another_are_gone(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    (old, _), (new, _) = shop(dsn, "a", rps=5, lease_for=60), shop(dsn, "a", rps=7, lease_for=90)
    async with AsyncExitStack() as last:
        async with working(old):
            await last.enter_async_context(working(new))
            assert setting(db, "rps") == 5
            assert "live workers declare different settings" in caplog.text
            assert "rps = 5 by" in caplog.text
        await until(lambda: setting(db, "rps") == 7)
        assert setting(db, "lease_for") == "PT1M30S"


async def test_a_setting_that_code_no_longer_declares_goes_back_but_an_operators_stays(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with working(shop(dsn, "a", ttl=60, max_attempts=3, max_in_flight=9)[0]):
        db.execute("select pgmb.alter_queue('q', max_in_flight => 4, rps => 11)")
    async with working(shop(dsn, "a")[0]):
        found = {name: setting(db, name) for name in ("ttl", "max_attempts", "max_in_flight", "rps")}
        assert found == {"ttl": None, "max_attempts": 10, "max_in_flight": 4, "rps": 11}


async def test_a_filter_of_an_operator_outlives_a_worker_that_declares_none(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('q', '{a}')")
    db.execute("select pgmb.bind('q', '{a}', filter => '$.payload > 1')")
    async with working(shop(dsn, "a", "b")[0]):
        assert (bound(db), setting(db, "filter")) == (["a", "b"], "$.payload > 1")


@pytest.mark.parametrize(
    ("present", "declared", "says"),
    [
        ("lanes => '{vip.#}'", {"lanes": ["new.#"]}, r'lanes = \["vip\.#"\], the code declares \["new\.#"\]'),
        ("ordered => true", {"ordered": True, "shards": 8}, "shards = 4, the code declares 8"),
        ("fair_by => 'key'", {"fair_by": "header:a"}, 'fair_by = "key", the code declares "header:a"'),
        ("", {"ordered": True}, "ordered = false, the code declares true"),
    ],
)  # fmt: skip
async def test_a_queue_of_another_kind_is_refused_with_the_command_that_converts_it(
    dsn: str, db: psycopg.Connection[Any], present: str, declared: dict[str, Any], says: str
) -> None:
    db.execute(f"select pgmb.create_queue('q', '{{a}}'{', ' + present if present else ''})")
    with pytest.raises(pgmb.Conflict, match=says) as refused:
        await shop(dsn, "a", **declared)[0].work(asyncio.Event())
    assert refused.value.hint is not None
    assert "pgmb queues convert" in refused.value.hint


async def test_an_app_is_refused_a_queue_of_another_app_unless_both_share_it(dsn: str) -> None:
    async with working(shop(dsn, "a", name="billing", shared=True)[0]):
        with pytest.raises(
            pgmb.Conflict, match=r"belongs to app 'billing': its worker .+:[0-9]+ was"
        ) as refused:
            await shop(dsn, "a", name="mail")[0].work(asyncio.Event())
        assert refused.value.hint is not None
        assert "shared=True" in refused.value.hint
        async with working(shop(dsn, "a", name="mail", shared=True)[0]):
            pass
        async with working(shop(dsn, "a", name="billing")[0]):
            pass


async def test_a_queue_stays_with_its_app_while_no_worker_runs_until_it_is_handed_over(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    def crm(**options: Any) -> pgmb.App:
        return shop(dsn, "a", name="crm", **options)[0]

    async with working(shop(dsn, "a", name="shop")[0]):
        pass
    for other in (crm(), crm(shared=True)):
        with pytest.raises(
            pgmb.Conflict, match="'q' belongs to app 'shop', and this is app 'crm'"
        ) as refused:
            await other.work(asyncio.Event())
        assert "pgmb queues hand-over q crm" in (refused.value.hint or "")
    async with working(shop(dsn, "a")[0]):
        pass
    db.execute("select pgmb.bind('q', '{a}')")
    with pytest.raises(pgmb.Conflict, match="belongs to app 'shop'"):
        await crm().work(asyncio.Event())
    async with working(shop(dsn, "a", name="shop")[0]) as broker:
        await broker.hand_over("q", "crm")
    with pytest.raises(pgmb.Conflict, match="belongs to app 'crm', and this is app 'shop'"):
        await shop(dsn, "a", name="shop")[0].work(asyncio.Event())
    async with working(crm()):
        pass


async def test_a_worker_goes_on_with_a_queue_that_was_handed_over(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaring, "_KEEP_EVERY_SECONDS", 0.0)
    async with working(shop(dsn, "a", name="shop")[0]) as broker:
        await broker.hand_over("q", "crm")
        db.execute("update pgmb.declaration set handlers = '{}'")
        told = "select handlers <> '{}' from pgmb.declaration"
        await until(lambda: db.execute(told).fetchone() == (True,))
    assert db.execute("select app from pgmb.owner").fetchone() == ("crm",)


async def test_a_program_without_a_name_is_warned_of_another_in_its_queue(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with working(shop(dsn, "a")[0]), working(shop(dsn, "b")[0]):
        assert sorted(kinds(db)) == ["patterns", "programs"]
    assert "two programs seem to consume it" in caplog.text


async def test_a_queue_that_a_renamed_handler_left_behind_is_told(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with working(program(dsn, "mail", "user.*")[0]):
        pass
    renamed, seen = pgmb.App(dsn), list[Any]()
    there = ModuleType("mail")
    there.__dict__.update(app=renamed, seen=seen)
    exec(
        "@renamed.on('user.*')\nasync def post(number: int) -> None: ...",
        {**there.__dict__, "renamed": renamed},
    )
    async with working(renamed):
        assert kinds(db) == ["stranded"]
        assert "queue mail.notify: no live worker has handlers of it any more" in caplog.text
        assert "pgmb queues drop mail.notify" in caplog.text
        db.execute("select pgmb.bind('mail.notify', '{user.*}')")
        assert kinds(db) == [], "an operator took it"


async def test_a_queue_that_lacks_what_all_workers_declare_is_told(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    condition = "e.topic <> 'c'"
    async with working(shop(dsn, "a", "b", rps=5, condition=condition)[0]):
        assert kinds(db) == []
        db.execute("select pgmb.bind('q', '{a}')")
        assert kinds(db) == ["unbound"]
        (found,) = [one for one in doctor.examine(db, doctor.Limits()) if one.check == "declarations"]
        assert (found.level.name, found.message) == (
            "FAIL",
            "queue q: it is not bound to patterns that live workers declare: b",
        )
        db.execute("select pgmb.bind('q', '{a,b}', no_filter => true), pgmb.alter_queue('q', rps => 6)")
        assert kinds(db) == ["overridden"]


async def test_an_app_remembers_its_queues_by_its_name(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with working(shop(dsn, "a", queue="one", name="shop")[0]):
        pass
    async with working(shop(dsn, "a", queue="two", name="mail")[0]):
        assert kinds(db) == [], "another app's queue"
    async with working(shop(dsn, "a", queue="three", name="shop")[0]):
        assert kinds(db) == ["stranded"]


@pytest.mark.parametrize("name", [None, "shop"])
async def test_a_queue_that_live_code_handles_is_never_advised_to_be_dropped(
    dsn: str, db: psycopg.Connection[Any], name: str | None
) -> None:
    seen: list[int] = []

    async def notify(number: int) -> None:
        seen.append(number)

    def code(*queues: str) -> pgmb.App:
        app = pgmb.App(dsn, name=name)
        for queue in queues:
            app.on(queue, queue=queue)(notify)
        return app

    app, newer = code("one", "two"), code("one")
    async with working(app, queues=["one"]) as broker:
        async with working(app, queues=["two"]):
            assert kinds(db) == []
        async with working(newer):
            assert kinds(db) == ["stopped"], "of an old worker that still runs"
        await broker.publish("two", 1)
        (found,) = await broker.queue_disagreements()
        assert (found.queue, found.kind) == ("two", "stopped")
        assert "has handlers of it" in found.message
        assert "pgmb work MODULE:APP --queue two" in found.hint
        assert "drop" not in found.hint
        async with working(app, queues=["two"]):
            await until(lambda: seen == [1])
            assert kinds(db) == []
    async with working(newer) as broker:
        (found,) = await broker.queue_disagreements()
        assert (found.queue, found.kind) == ("two", "stranded")
        assert "pgmb queues drop two" in found.hint


async def test_a_process_for_some_queues_is_not_told_of_the_others(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = shop(dsn, "a", queue="one")
    app.on("b", queue="two")(lambda payload: None)
    async with working(app):
        pass
    async with working(app, queues=["one"]):
        pass
    assert "queue two" not in caplog.text


async def test_pruning_removes_patterns_that_no_live_worker_declares(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("select pgmb.create_queue('q', '{old,a,b}')")
    async with working(shop(dsn, "a")[0]), working(shop(dsn, "b")[0]) as broker:
        assert "undeclared" in kinds(db)
        declarations = declaring.Declarations(broker)
        declarations._queues = {"q": declaring.QueueSpec("q")}
        with caplog.at_level(logging.WARNING):
            await declarations.prune()
        assert bound(db) == ["a", "b"]
        assert "queue q: removing old: no live worker declares it" in caplog.text
    assert db.execute("select pgmb.prune_queue('q')").fetchone() == ([],), "nobody is there to ask"


async def test_an_app_declares_again_where_the_database_forgot_it(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaring, "_KEEP_EVERY_SECONDS", 0.0)
    async with working(shop(dsn, "a", rps=3)[0]):
        db.execute("select pgmb.alter_queue('q', rps => 8)")
        db.execute("delete from pgmb.declaration")
        await until(
            lambda: db.execute("select patterns from pgmb.queue_declarations('q')").fetchone() == (["a"],)
        )
        assert setting(db, "rps") == 8, "an operator's change stays until the next start"


async def test_intervals_are_compared_by_their_length(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with (
        working(shop(dsn, "a", ttl=86_400, rps=5)[0]),
        working(shop(dsn, "a", ttl=timedelta(days=1), rps=5.0)[0]),
    ):
        assert kinds(db) == []


async def test_a_queue_that_a_transaction_locks_is_worked_and_declared_later(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    db.execute("select pgmb.create_queue('q', '{a}')")
    app, seen = shop(dsn, "a", "b")
    app.on("mail", queue="mail")(lambda payload: seen.append(payload or 0))
    with psycopg.connect(dsn) as other:
        other.execute("select pgmb.pause('q')")
        async with working(app) as broker:
            assert "a transaction locks it; using it as it is, declaring it later" in caplog.text
            await broker.publish("mail", 1)
            await broker.publish("a", 2)
            await until(lambda: sorted(seen) == [1, 2])
            other.rollback()
            await until(lambda: bound(db) == ["a", "b"])


async def test_a_worker_that_stood_still_binds_its_patterns_again(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_after(monkeypatch, 1.0)
    async with working(shop(dsn, "a", "b")[0]):
        db.execute("select pgmb.bind('q', '{a}')")
        time.sleep(1.5)  # noqa: ASYNC251 - the event loop stands still
        await until(lambda: bound(db) == ["a", "b"])


async def test_a_worker_whose_network_was_away_takes_back_what_others_removed_meanwhile(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_after(monkeypatch, 1.0)
    with StallingProxy(dsn) as proxy:
        away, seen = shop(proxy.dsn, "a", "b", rps=500)
        away.every("0 3 * * *", "a", name="nightly")
        async with working(away):
            assert bound(db) == ["a", "b"]
            proxy.cut()
            await until(lambda: (proxy.refused or 0) > 0)
            db.execute("update pgmb.worker set heartbeat_at = heartbeat_at - interval '31 s'")
            db.execute("select pgmb.drop_schedule('nightly')")
            async with working(shop(dsn, "a")[0]):
                db.execute("select pgmb.prune_queue('q')")
                assert (bound(db), setting(db, "rps")) == (["a"], None)
                await asyncio.sleep(1.2)
            proxy.restore()
            await until(lambda: (bound(db), setting(db, "rps")) == (["a", "b"], 500))
            await until(lambda: db.execute("select name from pgmb.schedules()").fetchall() == [("nightly",)])
            async with await pgmb.aconnect(dsn) as direct:
                await direct.publish("b", 7)
            await until(lambda: seen == [7])


async def test_a_worker_binds_again_within_minutes_what_was_removed_without_its_knowledge(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declaring, "_KEEP_EVERY_SECONDS", 0.0)
    async with working(shop(dsn, "a", "b")[0]):
        db.execute("select pgmb.bind('q', '{a}')")
        await until(lambda: bound(db) == ["a", "b"])
