"""What an operator changes is changed and written down, together; nobody else changes anything."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import paused_queues
from tests.server.dashboard.visitor import visiting

DB = psycopg.Connection[Any]


def one(db: DB, statement: str, *parameters: Any) -> Any:
    found = db.execute(statement.encode(), parameters).fetchone()
    return found and (found[0] if len(found) == 1 else found)


def recorded(db: DB) -> list[tuple[Any, ...]]:
    return db.execute("select actor, action, subject, detail from pgmb.audit order by id").fetchall()


@pytest.fixture
def broker(dsn: str) -> Any:
    with pgmb.connect(dsn, max_size=1) as made:
        made.create_queue("a/b", ["#"])
        yield made


def bury(broker: pgmb.Broker, count: int, error: str, queue: str = "a/b") -> None:
    broker.publish_many([pgmb.NewEvent("t", n) for n in range(count)])
    left = count
    while left:
        lease = broker.receive(queue, max=left)
        left -= len(lease)
        broker.bury(lease, error=error)


async def test_a_queue_is_paused_resumed_sought_and_purged(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.publish_many([pgmb.NewEvent("t", n) for n in range(5)])
    async with visiting(dsn) as visitor:
        answer = await visitor.send("/ui/queue", name="a/b", action="pause", reason="<i>why</i>")
        assert "a/b is paused" in answer.text
        assert "&lt;i&gt;why" in answer.text
        assert paused_queues(db) == {"a/b": "<i>why</i>"}
        await visitor.send("/ui/queue", name="a/b", action="resume")
        assert paused_queues(db) == {}
        await visitor.send("/ui/queue", name="a/b", action="purge", confirm="yes")
        assert broker.queue_depth("a/b") == 0
        await visitor.send("/ui/queue", name="a/b", action="seek", to="earliest", confirm="yes")
        assert broker.queue_depth("a/b") == 5
        await visitor.send("/ui/queue", name="a/b", action="seek", to="now", confirm="yes")
        assert broker.queue_depth("a/b") == 0
        await visitor.send(
            "/ui/queue", name="a/b", action="seek", to="time", at="2020-01-01T10:00", confirm="yes"
        )
        assert broker.queue_depth("a/b") == 5
        for fields in (
            {"action": "purge"},
            {"action": "seek", "to": "time", "confirm": "yes"},
            {"action": "seek", "to": "nowhere", "confirm": "yes"},
            {"action": "drop", "confirm": "yes"},
        ):
            assert (await visitor.send("/ui/queue", name="a/b", **fields)).status_code == 422
        assert (await visitor.send("/ui/queue", name="gone", action="pause")).status_code == 404
    assert [(actor, action, subject) for actor, action, subject, _ in recorded(db)] == [
        ("key:operateer", action, "a/b") for action in ("pause", "resume", "purge", "seek", "seek", "seek")
    ]
    assert recorded(db)[-1][3] == {"to": "2020-01-01 10:00:00 UTC"}


async def test_dead_letters_go_back_chosen_or_by_what_they_have_in_common(
    dsn: str, db: DB, broker: pgmb.Broker
) -> None:
    bury(broker, 3, "boom")
    bury(broker, 620, "timeout at 10")
    ids = [row[0] for row in db.execute("select id from pgmb.dead order by id").fetchall()]
    upto = ids[-1]
    async with visiting(dsn) as visitor:
        answer = await visitor.send("/ui/dead", action="redrive-chosen", id=[str(one) for one in ids[:2]])
        assert "2 dead letters sent back" in answer.text
        bury_later = upto + 1
        answer = await visitor.send("/ui/dead", action="redrive-matching", error="TIMEOUT", upto=str(upto))
        assert "620 dead letters sent back" in answer.text
        assert one(db, "select count(*) from pgmb.dead") == 1
        assert (await visitor.send("/ui/dead", action="drop-chosen", id=str(ids[2]))).status_code == 422
        assert one(db, "select count(*) from pgmb.dead") == 1
        answer = await visitor.send("/ui/dead", action="drop-chosen", id=str(ids[2]), confirm="yes")
        assert "1 dead letter dropped" in answer.text
        for fields in (
            {"action": "redrive-chosen", "id": "x"},
            {"action": "redrive-matching"},
            {"action": "nonsense"},
        ):
            assert (await visitor.send("/ui/dead", **fields)).status_code == 422
    assert bury_later > upto
    assert one(db, "select count(*) from pgmb.dead") == 0
    told = [(action, detail["count"]) for _, action, _, detail in recorded(db)]
    assert told == [("redrive_dead", 2), ("redrive_dead", 500), ("redrive_dead", 120), ("drop_dead", 1)]


async def test_what_dies_after_the_page_was_made_is_left_alone(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    bury(broker, 2, "boom")
    upto = one(db, "select max(id) from pgmb.dead")
    bury(broker, 2, "boom")
    async with visiting(dsn) as visitor:
        answer = await visitor.send("/ui/dead", action="drop-matching", upto=str(upto), confirm="yes")
        assert "2 dead letters dropped" in answer.text
    assert one(db, "select count(*), min(id) from pgmb.dead") == (2, upto + 1)


async def test_endpoints_are_paused_resumed_disabled_and_sent_to_again(
    dsn: str, db: DB, broker: pgmb.Broker
) -> None:
    broker.create_endpoint("hook", "https://a.example/", secret=None)
    event = broker.publish("t", 1)
    state = "select state from pgmb.endpoint"
    async with visiting(dsn) as visitor:
        for action, after in (("pause", "paused"), ("resume", "active"), ("disable", "disabled")):
            await visitor.send("/ui/endpoint", name="hook", action=action, confirm="yes", reason="r")
            assert one(db, state) == after
        await visitor.send("/ui/endpoint", name="hook", action="resume")
        answer = await visitor.send("/ui/endpoint", name="hook", action="resend", event=str(event))
        assert "1 event sent to hook again" in answer.text
        assert (await visitor.send("/ui/endpoint", name="hook", action="redrive-failed")).status_code == 200
        for fields in ({"action": "disable"}, {"action": "resend", "event": "x"}, {"action": "x"}):
            assert (await visitor.send("/ui/endpoint", name="hook", **fields)).status_code == 422
    assert [action for _, action, _, _ in recorded(db)] == [
        "pause_endpoint",
        "resume_endpoint",
        "disable_endpoint",
        "resume_endpoint",
        "resend",
        "redrive_failed",
    ]


async def test_a_change_that_fails_is_not_written_down(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.drop_queue("a/b")
    async with visiting(dsn) as visitor:
        assert (await visitor.send("/ui/queue", name="a/b", action="pause")).status_code == 404
    assert recorded(db) == []


async def test_a_schedule_is_run_paused_and_resumed(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    broker.create_schedule("n/s", "0 3 * * *", "report.due", {"kind": "full"})
    async with visiting(dsn) as visitor:
        assert (await visitor.send("/ui/schedule", name="n/s", action="run")).status_code == 422
        assert one(db, "select count(*) from pgmb.log_main") == 0
        answer = await visitor.send("/ui/schedule", name="n/s", action="run", confirm="yes")
        event = one(db, "select pgmb.browse() -> 'events' -> 0 ->> 'id'")
        assert f"n/s published event {event}" in answer.text
        assert "n/s is paused" in (await visitor.send("/ui/schedule", name="n/s", action="pause")).text
        assert broker.schedules()[0].paused_at is not None
        assert "n/s is resumed" in (await visitor.send("/ui/schedule", name="n/s", action="resume")).text
        assert broker.schedules()[0].paused_at is None
        assert (await visitor.send("/ui/schedule", name="n/s", action="drop")).status_code == 422
        assert (await visitor.send("/ui/schedule", name="gone", action="pause")).status_code == 404
    done = ("run_schedule", "pause_schedule", "resume_schedule")
    assert [row[:3] for row in recorded(db)] == [("key:operateer", action, "n/s") for action in done]
    assert recorded(db)[0][3] == {"event": event}


async def test_a_reader_who_tries_is_refused(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    async with visiting(dsn, "inspect") as visitor:
        for path, fields in (
            ("/ui/queue", {"name": "a/b", "action": "pause"}),
            ("/ui/dead", {"action": "drop-matching", "upto": "9", "confirm": "yes"}),
            ("/ui/endpoint", {"name": "x", "action": "pause"}),
            ("/ui/schedule", {"name": "x", "action": "run", "confirm": "yes"}),
        ):
            assert (await visitor.send(path, **fields)).status_code == 403
    assert paused_queues(db) == {}
    assert recorded(db) == []


async def test_a_form_that_is_not_the_sessions_own_is_refused(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    fields = {"name": "a/b", "action": "pause"}
    async with visiting(dsn) as visitor:
        own = await visitor.csrf()
        for given, headers in (
            ({}, {}),
            ({"csrf": "guess"}, {}),
            ({"csrf": own}, {"Sec-Fetch-Site": "cross-site"}),
            ({"csrf": own}, {"Sec-Fetch-Site": "same-site"}),
            ({"csrf": own}, {"Origin": "https://evil.example"}),
            ({"csrf": own}, {"Origin": "null"}),
        ):
            answer = await visitor.client.post("/ui/queue", data={**fields, **given}, headers=headers)
            assert answer.status_code == 403, (given, headers)
        json = await visitor.client.post("/ui/queue", json={**fields, "csrf": own})
        assert json.status_code == 415
        assert paused_queues(db) == {}
        good = {"Origin": "http://pgmb.test"}
        answer = await visitor.client.post("/ui/queue", data={**fields, "csrf": own}, headers=good)
        assert answer.status_code == 303
    assert "a/b" in paused_queues(db)


async def test_the_audit_is_searched(dsn: str, db: DB, broker: pgmb.Broker) -> None:
    db.execute(
        "select pgmb.record('key:a', 'pause', 'q' || n, '{\"reason\": \"r\"}') from generate_series(1, 130) n"
    )
    db.execute("select pgmb.record('key:b', 'seek', 'other')")
    async with visiting(dsn, "inspect") as visitor:
        assert "q1</bdi>" not in await visitor.page("/ui/audit?actor=key:b")
        assert "other" in await visitor.page("/ui/audit?action=seek")
        first = await visitor.page("/ui/audit?subject=q")
        assert first.count("<tr data-key") == 100
        older = await visitor.page("/ui/audit?subject=q&before=31")
        assert older.count("<tr data-key") == 30
