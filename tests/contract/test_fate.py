"""What became of an event: exact in every state, for those who may know it, at a cost that no log changes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from harness.states import make_due
from pgmb import schema
from tests.conftest import Connect
from tests.contract.cast import Cast
from tests.contract.endpoints import claim, create, receive, refused, settle, value

DB = psycopg.Connection[Any]


def publish(db: DB, topic: str = "a.b", **options: Any) -> UUID:
    named = "".join(f", {name} => %s" for name in options)
    made: UUID = value(db, f"select pgmb.publish(%s, '1'{named})", topic, *options.values())
    return made


def fate(db: DB, event: UUID, **options: Any) -> dict[str, Any]:
    named = "".join(f", {name} => %s" for name in options)
    found: dict[str, Any] = value(db, f"select pgmb.event_fate(%s{named})", event, *options.values())
    return found


def at(db: DB, event: UUID, name: str = "q") -> dict[str, Any]:
    """Where the event stands in that queue or at that endpoint."""
    (one,) = [consumer for consumer in fate(db, event)["consumers"] if consumer["name"] == name]
    found: dict[str, Any] = one
    return found


def state(db: DB, event: UUID, name: str = "q") -> str:
    return str(at(db, event, name)["state"])


def lease(db: DB, queue: str = "q", **options: Any) -> UUID:
    named = "".join(f", {name} => %s" for name in options)
    rows = db.execute(f"select lease from pgmb.receive(%s{named})", [queue, *options.values()]).fetchall()
    given: UUID = rows[0][0]
    return given


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def test_an_event_that_waits_is_received_and_acked(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{a.*}'), pgmb.create_queue('other', '{x}')")
    first, second = publish(db, key="k"), publish(db)
    found = fate(db, second)
    assert (found["found"], found["stream"], found["topic"], found["bytes"]) == ("log", "main", "a.b", 1)
    assert fate(db, first)["key"] == "k"
    assert {one["name"]: one["state"] for one in found["consumers"]} == {"q": "waiting", "other": "not taken"}
    assert (at(db, first)["ahead"], at(db, second)["ahead"]) == (0, 1)
    db.execute("select pgmb.pause('q', 'deploy')")
    assert at(db, first)["reason"] == "the queue is paused: deploy"
    db.execute("select pgmb.resume('q')")
    held = lease(db, max=1)
    seq = value(db, "select min(seq) from pgmb.log_main")
    one = at(db, first)
    assert (one["state"], one["attempt"], one["holder"]["backend"]) == ("leased", 1, db.info.backend_pid)
    assert moment(one["until"]) > moment(one["at"])
    assert state(db, second) == "waiting"
    db.execute("select pgmb.ack(%s, %s)", [held, [seq]])
    assert state(db, first) == "done"
    both = lease(db)
    db.execute("select pgmb.ack(%s)", [both])
    assert state(db, second) == "done"
    assert state(db, second, "other") == "not taken"
    db.execute("select pgmb.clear_settled()")
    assert (state(db, first), state(db, second)) == ("done", "done")


def test_every_attempt_keeps_its_error_to_the_dead_letter_and_back(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', max_attempts => 3)")
    event = publish(db)
    db.execute("select pgmb.retry(%s, after => '0', error => 'first', detail => 'line 7')", [lease(db)])
    one = at(db, event)
    assert (one["state"], one["attempt"], one["error"]) == ("retrying", 2, "first")
    db.execute("select pgmb.retry(%s, after => '1 hour', error => 'second')", [lease(db)])
    one = at(db, event)
    assert (one["state"], one["attempt"]) == ("retrying", 3)
    assert [(e["attempt"], e["error"], e.get("detail")) for e in one["errors"]] == [
        (1, "first", "line 7"),
        (2, "second", None),
    ]
    assert moment(one["errors"][0]["at"]) < moment(one["errors"][1]["at"]) < moment(one["until"])
    make_due(db)
    held = lease(db)
    one = at(db, event)
    assert (one["state"], one["attempt"], len(one["errors"])) == ("leased", 3, 2)
    assert one["holder"]["backend"] == db.info.backend_pid
    db.execute("select pgmb.retry(%s, error => 'third')", [held])
    one = at(db, event)
    assert (one["state"], one["attempt"], one["error"]) == ("dead", 3, "third")
    assert [e["error"] for e in one["errors"]] == ["first", "second", "third"]
    assert one["dead_letter"] == value(db, "select id from pgmb.dead")
    db.execute("select pgmb.redrive('q')")
    one = at(db, event)
    assert (one["state"], one["attempt"], len(one["errors"])) == ("retrying", 1, 3)
    db.execute("select pgmb.ack(%s)", [lease(db)])
    assert state(db, event) == "done"


def test_errors_are_kept_within_bounds(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', max_attempts => 20)")
    event = publish(db)
    for number in range(12):
        said, traced = f"{number}" + "\u00e9" * 3000, "\u00e9" * 3000 + "end"
        db.execute("select pgmb.retry(%s, null, '0', %s, detail => %s)", [lease(db), said, traced])
    errors = at(db, event)["errors"]
    assert [one["attempt"] for one in errors] == list(range(3, 13))
    assert all(len(one[part].encode()) <= 2000 for one in errors for part in ("error", "detail"))
    assert all(one["detail"].endswith("end") for one in errors)


def test_a_lease_that_expired_is_said_to_have(db: DB, connect: Connect) -> None:
    db.execute("select pgmb.create_queue('q')")
    event = publish(db)
    gone = connect()
    lease(gone, lease_for="1 millisecond")
    backend = gone.info.backend_pid
    gone.close()
    while value(db, "select count(*) from pg_stat_activity where pid = %s", backend):
        pass
    one = at(db, event)
    assert (one["state"], one["holder"]) == ("leased", {"backend": backend, "gone": True})
    assert "expired" in one["reason"]
    db.execute("select pg_sleep(0.06)")
    held = lease(db)
    one = at(db, event)
    assert (one["state"], one["attempt"], one["errors"][0]["error"]) == ("leased", 2, "lease expired")
    db.execute("select pgmb.release(%s)", [held])
    assert state(db, event) == "retrying"


def test_what_a_queue_never_had_is_not_done(db: DB) -> None:
    db.execute("select pgmb.create_queue('early')")
    before = publish(db)
    db.execute("select pgmb.create_queue('q')")
    skipped = publish(db)
    assert at(db, before)["reason"] == "the queue began after it"
    db.execute("select pgmb.purge('q')")
    after = publish(db)
    assert at(db, skipped)["state"] == "not taken"
    assert "moved past it" in at(db, skipped)["reason"]
    assert (state(db, before), state(db, after)) == ("not taken", "waiting")
    db.execute("select pgmb.seek('q', pgmb.earliest())")
    assert [state(db, event) for event in (before, skipped, after)] == ["waiting"] * 3
    db.execute("select pgmb.ack(%s)", [lease(db)])
    assert [state(db, event) for event in (before, skipped, after)] == ["done"] * 3


def test_filters_lanes_and_changed_patterns(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', filter => '$.payload == 2')")
    db.execute("select pgmb.create_queue('urgent', lanes => '{b.#}')")
    db.execute("select pgmb.create_queue('keyed', ordered => true)")
    db.execute("select pgmb.create_queue('bound', '{b.#}')")
    event = publish(db, "b.c", key="k")
    wanted = value(db, "select pgmb.publish('b.c', '2', key => 'k')")
    assert {one["name"]: one["state"] for one in fate(db, wanted)["consumers"]} == {
        "q": "waiting",
        "urgent": "waiting",
        "keyed": "waiting",
        "bound": "waiting",
    }
    assert state(db, event) == "not taken"
    for queue in ("q", "urgent", "keyed"):
        lease(db, queue, max=1)
    assert (state(db, event), state(db, wanted)) == ("not taken", "leased")
    assert (state(db, event, "urgent"), state(db, wanted, "urgent")) == ("leased", "waiting")
    assert (state(db, event, "keyed"), state(db, wanted, "keyed")) == ("leased", "waiting")
    db.execute("select pgmb.ack(%s)", [lease(db, "bound")])
    publish(db, "b.c")
    db.execute("select pgmb.ack(%s)", [lease(db, "bound")])
    db.execute("select pgmb.clear_settled()")
    db.execute("select pgmb.bind('bound', '{x}')")
    one = at(db, event, "bound")
    assert (one["state"], "changed" in one["reason"]) == ("unknown", True)


def test_endpoints_are_told_apart(db: DB) -> None:
    """One was posted to, one failed, one gave up, and one does not want the event."""
    posted, failed, dead = create(db, "posted"), create(db, "failed"), create(db, "dead")
    create(db, "unwanted", "{x}")
    event = publish(db)
    states = {one["name"]: one["state"] for one in fate(db, event)["consumers"]}
    assert states == dict.fromkeys(("posted", "failed", "dead"), "waiting")
    got = receive(db)
    assert state(db, event, "posted") == "leased"
    (seq,) = [row[1] for row in got.rows]
    said = [(seq, failed, "1 hour", "status 500", True, False), (seq, dead, None, "status 410", True, True)]
    assert settle(db, got.lease, None, said) == 1
    one = at(db, event, "failed")
    assert (one["kind"], one["state"], one["attempt"]) == ("endpoint", "retrying", 2)
    assert [(e["attempt"], e["error"]) for e in one["errors"]] == [(1, "status 500")]
    assert (state(db, event, "dead"), at(db, event, "dead")["error"]) == ("dead", "status 410")
    assert state(db, event, "posted") == "done"
    make_due(db)
    claim(db)
    one = at(db, event, "failed")
    assert (one["state"], one["holder"]["backend"]) == ("leased", db.info.backend_pid)
    db.execute(
        "insert into pgmb.attempt (endpoint, seq, event_id, attempt, status, seconds)"
        " values (%s, %s, %s, 1, 200, 0.1)",
        [posted, seq, event],
    )
    assert at(db, event, "posted")["at"] is not None


@pytest.mark.new_database
def test_what_is_not_in_the_log_gets_a_clear_answer(db: DB, connect: Connect) -> None:
    db.execute("select pgmb.create_queue('q', max_attempts => 1)")
    later = publish(db, delay="1 hour")
    assert (fate(db, later)["found"], fate(db, later)["consumers"]) == ("delayed", [])
    assert fate(db, later)["due_at"] is not None
    assert fate(db, uuid4())["found"] == "unknown"
    chosen = publish(db, id=uuid4())
    assert (fate(db, chosen)["found"], state(db, chosen)) == ("log", "waiting")
    keyed = publish(db, dedup_key="once")
    assert fate(db, keyed)["found"] == "log"
    open_one = connect(autocommit=False)
    unseen = publish(open_one)
    assert fate(db, unseen)["found"] == "uncommitted"
    open_one.rollback()
    buried, done = publish(db), publish(db)
    seqs = [row[0] for row in db.execute("select seq from pgmb.log_main order by seq")]
    held = lease(db)
    db.execute("select pgmb.bury(%s, %s, 'no')", [held, seqs[-2:-1]])
    db.execute("select pgmb.ack(%s)", [held])
    db.execute("select pgmb.alter_stream('main', keep_for => '1 microsecond')")
    db.execute("select pgmb.rotate()")
    for _ in range(3):
        db.execute("select pgmb.maintain()")
        db.execute("select pgmb.receive('q')")
    assert value(db, "select count(*) from pgmb.log_main") == 0
    assert (fate(db, done)["found"], fate(db, done)["consumers"]) == ("dropped", [])
    assert (fate(db, buried)["found"], state(db, buried)) == ("copy", "dead")


def test_messages_of_pgmq_queues(db: DB, dsn: str) -> None:
    """PGMQ's functions keep what was read in tables of their own."""
    schema.install(dsn, compat=["pgmq"])
    db.execute("select pgmq.create('tasks')")
    sent = value(db, "select pgmq.send('tasks', '{}')")
    stream = value(db, "select stream from pgmq.queue")
    between = "select id from pgmb.between(%s, pgmb.earliest(%s), pgmb.position(%s))"
    event = value(db, between, stream, stream, stream)
    assert [one["state"] for one in fate(db, event)["consumers"]] == ["waiting"]
    db.execute("select pgmq.read('tasks', 3600, 1)")
    (one,) = fate(db, event)["consumers"]
    assert (one["state"], one["attempt"]) == ("leased", 1)
    assert moment(one["until"]).year < 3000
    db.execute("select pgmq.set_vt('tasks', %s, 0)", [sent])
    assert [one["state"] for one in fate(db, event)["consumers"]] == ["waiting"]
    db.execute("select pgmq.delete('tasks', %s::bigint)", [sent])
    assert [one["state"] for one in fate(db, event)["consumers"]] == ["done"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_pgmq_message_deleted_out_of_a_read_is_done(db: DB, dsn: str, count: int) -> None:
    """The read still holds the others; they are leased."""
    schema.install(dsn, compat=["pgmq"])
    db.execute("select pgmq.create('tasks')")
    db.execute("select pgmq.send_batch('tasks', array_fill('{}'::jsonb, array[%s]))", [count])
    stream = value(db, "select stream from pgmq.queue")
    between = "select id from pgmb.between(%s, pgmb.earliest(%s), pgmb.position(%s)) order by seq"
    events = [event for (event,) in db.execute(between, [stream] * 3)]
    numbers = [number for (number,) in db.execute("select msg_id from pgmq.read('tasks', 3600, 1000)")]
    db.execute("select pgmq.delete('tasks', %s::bigint)", numbers[:1])
    states = [one["state"] for event in events for one in fate(db, event)["consumers"]]
    assert states == ["done"] + ["leased"] * (count - 1)


def test_a_role_sees_what_it_may_read(db: DB, cast: Cast) -> None:
    db.execute("select pgmb.create_queue('mine', '{a.#}'), pgmb.create_queue('theirs')")
    create(db, "hook")
    event, foreign = publish(db), publish(db, "x")
    consumer, reader, nobody = cast.role("consumer"), cast.role("reader"), cast.role("nobody")
    db.execute("select pgmb.grant_consume('mine', %s), pgmb.grant_read('main', %s)", [consumer, reader])
    db.execute("select pgmb.create_stream('elsewhere')")
    db.execute("select pgmb.grant_read('elsewhere', %s)", [nobody])
    acting = cast.acting(consumer)
    found = fate(acting, event)
    assert (found["topic"], [one["name"] for one in found["consumers"]]) == ("a.b", ["mine"])
    assert fate(acting, foreign)["found"] == "unknown", "its queue does not take it"
    found = fate(cast.acting(reader), event)
    assert (found["topic"], found["consumers"]) == ("a.b", [])
    assert fate(cast.acting(nobody), event)["found"] == "unknown"
    assert {one["name"] for one in fate(db, event)["consumers"]} == {"mine", "theirs", "hook"}
    with refused("42501"):
        fate(cast.acting(cast.role("stranger")), event)


def test_workers_say_that_they_live(db: DB, cast: Cast, connect: Connect) -> None:
    db.execute("select pgmb.create_queue('q')")
    event = publish(db)
    consumer, other = cast.role("consumer", "pgmb_consumer"), cast.role("other", "pgmb_consumer")
    acting, worker = cast.acting(consumer), uuid4()
    beat = "select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}', %s)"
    acting.execute("set application_name = 'shop'")
    acting.execute(beat, [worker, [acting.info.backend_pid]])
    lease(acting)
    assert at(db, event)["holder"] == {
        "backend": acting.info.backend_pid,
        "host": "host7",
        "pid": 4711,
        "application": "shop",
        "worker": str(worker),
        "role": consumer,
    } | ({"address": at(db, event)["holder"]["address"]} if "address" in at(db, event)["holder"] else {})
    seen = "select worker, queues, alive from pgmb.describe_workers()"
    assert acting.execute(seen).fetchall() == db.execute(seen).fetchall() == [(worker, ["q"], True)]
    stranger = cast.acting(other)
    assert stranger.execute(seen).fetchall() == []
    with refused("42501"):
        stranger.execute(beat, [worker, []])
    stranger.execute("select pgmb.worker_depart(%s)", [worker])
    db.execute("update pgmb.worker set heartbeat_at = now() - interval '31 seconds'")
    assert db.execute(seen).fetchall() == [(worker, ["q"], False)]
    db.execute("update pgmb.worker set heartbeat_at = now() - interval '61 minutes'")
    newer = uuid4()
    acting.execute(beat, [newer, [os.getpid()]])
    assert [row[0] for row in db.execute(seen)] == [newer]
    acting.execute("select pgmb.worker_depart(%s)", [newer])
    assert db.execute(seen).fetchall() == []


def test_events_that_wait_behind_a_conversion_are_not_done(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', ordered => true)")
    events = [publish(db, "a", key=f"k{number}") for number in range(12)]
    first = lease(db, max=1)
    db.execute("select pgmb.bury(%s, error => 'x')", [first])
    second = lease(db, max=1)
    db.execute("select pgmb.retry(%s, after => '1 hour', error => 'x')", [second])
    third = lease(db, max=1)
    db.execute("select pgmb.ack(%s)", [third])
    before = sorted(state(db, event) for event in events)
    for form in "", ", ordered => true", ", lanes => '{b}'", ", fair_by => 'key'":
        db.execute(f"select pgmb.convert_queue('q'{form})".encode())
        assert sorted(state(db, event) for event in events) == before
        row = db.execute("select waiting, retries, dead from pgmb.queue_status where queue = 'q'").fetchone()
        assert row == (9, 1, 1), form
