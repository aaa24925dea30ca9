"""Declarations of workers: made one after another, bounded, and counted only for roles that may consume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from harness.sessions import Session
from harness.states import queue_settings
from tests.contract.cast import Cast

DECLARE = "select pgmb.declare_queue(%s, %s, %s, %s, null, %s)"


def declare(
    db: psycopg.Connection[Any],
    *patterns: str,
    queue: str = "q",
    app: str | None = None,
    handlers: tuple[str, ...] = ("shop.notify",),
    **settings: Any,
) -> UUID:
    """A worker that has just said so."""
    worker = uuid4()
    db.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, %s, app => %s)", [worker, [queue], app])
    db.execute(DECLARE, [worker, queue, list(patterns), json.dumps(settings), list(handlers)])
    return worker


def bound(db: psycopg.Connection[Any]) -> Any:
    return db.execute("select patterns from pgmb.queue_status where queue = 'q'").fetchone()


@pytest.fixture
def queue(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', '{a}')")


@pytest.mark.usefixtures("queue")
def test_two_workers_that_start_at_once_both_add_their_patterns(
    db: psycopg.Connection[Any], sessions: Mapping[str, Session]
) -> None:
    one, two = sessions["one"], sessions["two"]
    for session in (one, two):
        session.run("begin")
    one.run("select pgmb.declare_queue(null, 'q', '{b}')")
    waiting = two.start("select pgmb.declare_queue(null, 'q', '{c}')").blocked()
    one.run("commit")
    waiting.result()
    two.run("commit")
    assert bound(db) == (["a", "b", "c"],)


@pytest.mark.usefixtures("queue")
def test_of_two_workers_that_start_at_once_neither_applies_its_setting(
    db: psycopg.Connection[Any], sessions: Mapping[str, Session]
) -> None:
    one, two, workers = sessions["one"], sessions["two"], [uuid4(), uuid4()]
    for worker in workers:
        db.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')", [worker])
        db.execute(DECLARE, [worker, "q", ["a"], "{}", []])
    one.run("begin")
    one.run(DECLARE, [workers[0], "q", ["a"], '{"rps": 5}', []])
    waiting = two.start(DECLARE, [workers[1], "q", ["a"], '{"rps": 7}', []]).blocked()
    one.run("commit")
    ((answer,),) = waiting.result()
    assert answer["pending"] == ["rps"]
    assert queue_settings(db)["rps"] is None


@pytest.mark.usefixtures("queue")
def test_pruning_waits_for_a_worker_that_declares(
    db: psycopg.Connection[Any], sessions: Mapping[str, Session]
) -> None:
    declare(db, "b")
    starting, pruning, worker = sessions["starting"], sessions["pruning"], uuid4()
    db.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')", [worker])
    starting.run("begin")
    starting.run(DECLARE, [worker, "q", ["c"], "{}", []])
    waiting = pruning.start("select pgmb.prune_queue('q')").blocked()
    starting.run("commit")
    assert waiting.result() == [(["a"],)]
    assert bound(db) == (["b", "c"],)


@pytest.mark.usefixtures("queue")
def test_a_silent_worker_does_not_count(db: psycopg.Connection[Any]) -> None:
    declare(db, "a", app="shop", rps=5)
    db.execute("update pgmb.worker set heartbeat_at = heartbeat_at - interval '31 seconds'")
    declare(db, "a", app="shop", rps=7)
    assert queue_settings(db)["rps"] == 7


def test_a_role_counts_only_where_it_may_consume(db: psycopg.Connection[Any], cast: Cast) -> None:
    for name in ("q", "other"):
        db.execute("select pgmb.create_queue(%s, '{a}')", [name])
    role = cast.role("mallory")
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    mallory = cast.acting(role)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        declare(mallory, "a", queue="other", app="mine")
    declare(mallory, "a", app="mine", rps=5)
    with pytest.raises(psycopg.Error, match="belongs to app 'mine'"):
        declare(db, "a", app="shop")
    mine = "select count(*) from pgmb.queue_declarations('q')"
    assert db.execute(mine).fetchone() == (1,)
    db.execute("select pgmb.revoke_consume('q', %s)", [role])
    assert db.execute(mine).fetchone() == (0,)
    declare(db, "a", app="shop", rps=7)
    assert queue_settings(db)["rps"] == 7


@pytest.mark.usefixtures("queue")
def test_a_consumer_changes_nothing_of_the_queue(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("plain")
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    plain = cast.acting(role)
    ((answer,),) = plain.execute("select pgmb.declare_queue(null, 'q', '{a,b}', '{\"rps\": 5}')").fetchall()
    assert (answer["added"], answer["applied"], answer["denied"]) == ([], {}, True)
    assert bound(db) == (["a"],)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        plain.execute("select pgmb.prune_queue('q')")


@pytest.mark.usefixtures("queue")
def test_a_worker_of_another_role_cannot_be_spoken_for(db: psycopg.Connection[Any], cast: Cast) -> None:
    worker = declare(db, "a")
    role = cast.role("plain")
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="has no worker"):
        cast.acting(role).execute(DECLARE, [worker, "q", ["b"], "{}", []])


@pytest.mark.usefixtures("queue")
def test_what_a_worker_declares_is_bounded(db: psycopg.Connection[Any]) -> None:
    large = "x" * 70_000
    with pytest.raises(psycopg.errors.CheckViolation, match="patterns must have at most"):
        declare(db, large)
    with pytest.raises(psycopg.errors.CheckViolation, match="handlers must have at most"):
        declare(db, "a", handlers=(large,))
    with pytest.raises(psycopg.errors.CheckViolation, match="app's name must have"):
        declare(db, "a", app="x" * 101)
    with pytest.raises(psycopg.errors.CheckViolation, match="queues must have at most"):
        db.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'h', 1, array[repeat('x', 3000000)])")
    assert db.execute("select count(*) from pgmb.declaration").fetchone() == (0,)


@pytest.mark.usefixtures("queue")
def test_an_unknown_setting_is_refused(db: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.Error, match="unknown setting") as refused:
        db.execute("select pgmb.declare_queue(null, 'q', '{a}', '{\"rpps\": 5}')")
    assert refused.value.sqlstate == "MB005"


@pytest.mark.usefixtures("queue")
def test_declarations_end_with_their_worker_and_their_queue(db: psycopg.Connection[Any]) -> None:
    worker = declare(db, "a")
    declare(db, "a")
    db.execute("select pgmb.worker_depart(%s)", [worker])
    assert db.execute("select count(*) from pgmb.declaration").fetchone() == (1,)
    db.execute("select pgmb.drop_queue('q')")
    counts = "select (select count(*) from pgmb.declaration), (select count(*) from pgmb.owner)"
    assert db.execute(counts).fetchone() == (0, 0)


@pytest.mark.usefixtures("queue")
def test_a_consumers_open_declaration_blocks_nobody(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("small")
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    small = cast.acting(role)
    with small.transaction():
        declare(small, "b", app="shop")
        db.execute("set statement_timeout = '3s'")
        assert declare(db, "c", app="shop", rps=5) is not None
        for statement in (
            "select pgmb.declare_queue(null, 'q', '{d}', '{\"ttl\": \"PT1H\"}')",
            "select pgmb.prune_queue('q')",
            "select pgmb.bind('q', '{a,c}')",
            "select pgmb.alter_queue('q', rps => 7)",
            "select pgmb.pause('q'), pgmb.resume('q')",
        ):
            db.execute(statement)
    assert bound(db) == (["a", "c"],)


def test_a_heartbeat_locks_no_worker_of_another_role(db: psycopg.Connection[Any], cast: Cast) -> None:
    worker = uuid4()
    beat = "select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')"
    db.execute("select pgmb.create_queue('q')")
    small = cast.acting(cast.role("small", "pgmb_consumer"))
    for away in ("- interval '2 hours'", "+ interval '2 hours'"):
        db.execute(beat, [worker])
        db.execute(f"update pgmb.worker set heartbeat_at = heartbeat_at {away}")
        with small.transaction():
            small.execute(beat, [uuid4()])
            with pytest.raises(psycopg.errors.InsufficientPrivilege), small.transaction():
                small.execute(beat, [worker])
            db.execute("set lock_timeout = '1s'")
            db.execute(beat, [worker])


@pytest.mark.usefixtures("queue")
def test_a_worker_declares_though_a_transaction_locks_the_queue(
    db: psycopg.Connection[Any], sessions: Mapping[str, Session]
) -> None:
    other, worker = sessions["other"], uuid4()
    db.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')", [worker])
    other.run("begin")
    other.run("select pgmb.alter_queue('q', rps => 3)")
    ((answer,),) = db.execute(DECLARE, [worker, "q", ["b"], '{"rps": 5}', []]).fetchall()
    assert (answer["busy"], answer["added"], answer["applied"]) == (True, [], {})
    assert db.execute("select patterns from pgmb.queue_declarations('q')").fetchone() == (["b"],)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        db.execute("select pgmb.prune_queue('q')")
    other.run("commit")
    ((answer,),) = db.execute(DECLARE, [worker, "q", ["b"], '{"rps": 5}', []]).fetchall()
    assert (answer["busy"], answer["added"], answer["applied"]) == (False, ["b"], {"rps": 5})


@pytest.mark.usefixtures("queue")
def test_a_consumers_code_is_remembered_beyond_its_end(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("small")
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    small, worker = cast.acting(role), uuid4()
    small.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')", [worker])
    small.execute("select pgmb.declare_queue(%s, 'q', '{a}', code => 'new')", [worker])
    small.execute("select pgmb.worker_depart(%s)", [worker])
    declare_code(db, "old")
    age_code(db, "9 minutes")
    assert runs_other_code(db)


@pytest.mark.usefixtures("queue")
def test_code_is_forgotten_once_workers_were_heard_for_ten_minutes_without_it(
    db: psycopg.Connection[Any],
) -> None:
    declare_code(db, "new")
    declare_code(db, "old")
    for _ in range(4):
        assert runs_other_code(db)
        age_code(db, "3 minutes")
        declare_code(db, "old")
    assert not runs_other_code(db)


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("away", ["1 hour", "-1 hour"])
def test_an_outage_or_a_step_of_the_clock_does_not_age_the_memory_of_code(
    db: psycopg.Connection[Any], away: str
) -> None:
    declare_code(db, "new")
    declare_code(db, "old")
    age_code(db, away)
    assert runs_other_code(db)
    declare_code(db, "old")
    assert runs_other_code(db), "the old worker returned first"


def declare_code(db: psycopg.Connection[Any], code: str) -> None:
    """A worker starts, declares its code and stops."""
    worker = uuid4()
    db.execute("select pgmb.worker_heartbeat(%s, 'host7', 4711, '{q}')", [worker])
    db.execute("select pgmb.declare_queue(%s, 'q', '{a}', code => %s)", [worker, code])
    db.execute("select pgmb.worker_depart(%s)", [worker])


def age_code(db: psycopg.Connection[Any], by: str) -> None:
    db.execute("update pgmb.recent_code set declared_at = declared_at - %s::interval", [by])


def runs_other_code(db: psycopg.Connection[Any]) -> bool:
    ((runs,),) = db.execute("select pgmb.runs_other_code('q', 'old')").fetchall()
    return bool(runs)


def test_a_worker_learns_that_its_queue_was_converted_and_a_new_one_is_refused(
    db: psycopg.Connection[Any],
) -> None:
    db.execute("select pgmb.create_queue('q', '{a}', fair_by => 'key')")
    worker = declare(db, "a", fair_by="key")
    db.execute("select pgmb.convert_queue('q', true)")
    ((answer,),) = db.execute(DECLARE, [worker, "q", ["a"], '{"fair_by": "key"}', []]).fetchall()
    assert answer["settings"]["ordered"]
    with pytest.raises(psycopg.Error, match="the code declares") as refused:
        declare(db, "a", fair_by="key")
    assert refused.value.sqlstate == "MB006"
