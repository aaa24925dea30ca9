"""Queues with a filter lease, settle, move and report as others do: the matching events, each once."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

from harness.states import paused_queues, place, take_snapshot
from tests.conftest import Connect

FILTERS = [
    "filter => '$.n >= 0 || $.payload.wanted == true'",
    "condition => $$(e.payload->>'wanted')::bool$$",
]
RAISING = "condition => $$(e.payload->>'n')::int >= 0$$"


@pytest.fixture
def db(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("set statement_timeout = '60s'")
    return db


def publish(db: psycopg.Connection[Any], count: int, every: int = 2, first: int = 0) -> list[int]:
    """So many events, numbered; every nth is wanted. Returns the numbers of those."""
    db.execute(
        "select pgmb.publish_many(array_agg('t' || n %% 2), array_agg(json_build_object('n', n, 'wanted',"
        " n %% %s::int = 0)), keys => array_agg((n %% 5)::text)) from generate_series(%s::int, %s::int) n",
        [every, first, first + count - 1],
    )
    return [n for n in range(first, first + count) if n % every == 0]


def lease(db: psycopg.Connection[Any], max: int = 1000, lease_for: str | None = None) -> list[Any]:
    return db.execute(
        "select lease, seq, (payload->>'n')::int, attempt from pgmb.receive('q', %s, %s)", [max, lease_for]
    ).fetchall()


def release_the_rest(db: psycopg.Connection[Any], taken: list[Any], keyed: bool = False) -> None:
    """Gives back what the first event's lease still holds: with keys, what has another key than it."""
    if any(row[0] == taken[0][0] and not (keyed and row[2] % 5 == taken[0][2] % 5) for row in taken[1:]):
        db.execute("select pgmb.release(%s)", [taken[0][0]])


def drain(db: psycopg.Connection[Any], wanted: int) -> list[int]:
    """Receives and acks until so many have come, and then nothing more does."""
    got: list[int] = []
    until = time.monotonic() + 60
    while len(got) < wanted and time.monotonic() < until:
        taken = lease(db, 7)
        got += [row[2] for row in taken]
        for one in {row[0] for row in taken}:
            db.execute("select pgmb.ack(%s)", [one])
    assert lease(db) == []
    return sorted(got)


@pytest.mark.parametrize("asked", FILTERS)
@pytest.mark.parametrize(
    "settings",
    [
        "",
        ", ordered => true",
        ", lanes => '{t1}'",
        ", ttl => '1 hour'",
        ", max_in_flight => 9",
        ", rps => 10000",
    ],
)
def test_every_wanted_event_comes_and_is_settled_once(
    db: psycopg.Connection[Any], asked: str, settings: str
) -> None:
    db.execute(
        f"select pgmb.create_queue('q', backoff_base => '0 s', backoff_jitter => 0, {asked}{settings})"
    )
    wanted = publish(db, 40)
    settled: list[int] = []
    first = lease(db, 8, "10 ms")
    acked = [row[1] for row in first[:2]]
    settled += [row[2] for row in first[:2]]
    if first:
        db.execute("select pgmb.extend(%s, '10 ms')", [first[0][0]])
        assert db.execute("select pgmb.ack(%s, %s)", [first[0][0], acked]).fetchall() == [(len(acked),)]
    second = lease(db, 4)
    if second:
        db.execute("select pgmb.retry(%s, %s, '0 s')", [second[0][0], [second[0][1]]])
    release_the_rest(db, second, keyed="ordered" in settings)
    third = lease(db, 4)
    buried = [row[2] for row in third[:1]]
    if third:
        db.execute("select pgmb.bury(%s, %s)", [third[0][0], [third[0][1]]])
    release_the_rest(db, third)
    wanted += publish(db, 20, first=40)
    settled += drain(db, len(wanted) - len(settled) - len(buried))
    assert sorted(settled + buried) == wanted
    assert db.execute("select pgmb.queue_depth('q')").fetchall() == [(0,)]
    if buried:
        assert db.execute("select pgmb.redrive('q')").fetchall() == [(1,)]
        assert drain(db, 1) == buried
    db.execute("select pgmb.seek('q', pgmb.earliest())")
    assert db.execute("select pgmb.queue_depth('q')").fetchall() == [(len(wanted),)]
    assert drain(db, len(wanted)) == wanted


@pytest.mark.parametrize("asked", FILTERS)
def test_late_commits_and_own_events_pass_the_filter_too(
    db: psycopg.Connection[Any], connect: Connect, asked: str
) -> None:
    db.execute(f"select pgmb.create_queue('q', {asked})")
    late = connect(autocommit=False)
    wanted = publish(late, 10)
    wanted += publish(db, 10, first=10)
    got = lease(db)
    assert [row[2] for row in got] == wanted[5:]
    db.execute("select pgmb.ack(%s)", [got[0][0]])
    late.commit()
    got = lease(db)
    assert [row[2] for row in got] == wanted[:5]
    db.execute("select pgmb.ack(%s)", [got[0][0]])
    with db.transaction():
        publish(db, 10, first=20)
        lease(db)
    assert drain(db, 5) == [20, 22, 24, 26, 28]


def test_leases_keep_what_they_hold_when_the_filter_changes(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', filter => '$.payload.n < 5')")
    publish(db, 10)
    held = lease(db, lease_for="300 ms")
    assert [row[2] for row in held] == [0, 1, 2, 3, 4]
    db.execute("select pgmb.ack(%s, %s)", [held[0][0], [held[0][1]]])
    db.execute("select pgmb.bind('q', '{#}', filter => '$.payload.n > 11')")
    publish(db, 4, first=10)
    got: list[tuple[int, int]] = []
    until = time.monotonic() + 60
    while len(got) < 6 and time.monotonic() < until:
        taken = lease(db)
        got += [(row[2], row[3]) for row in taken]
        if taken:
            db.execute("select pgmb.ack(%s)", [taken[0][0]])
    assert sorted(got) == [(1, 2), (2, 2), (3, 2), (4, 2), (12, 1), (13, 1)]
    db.execute("select pgmb.bind('q', '{#}', no_filter => true)")
    publish(db, 2, first=20)
    assert drain(db, 2) == [20, 21]


def test_a_filter_that_matches_little_moves_in_bounded_steps(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', filter => '$.payload.wanted == true')")
    wanted = publish(db, 60_000, every=10_000)
    places = [0]
    got: list[int] = []
    for _ in range(40):
        got += [row[2] for row in lease(db)]
        places.append(place(db))
        assert places[-1] - places[-2] <= 26_000
        if len(got) == len(wanted):
            break
    assert got == wanted


@pytest.mark.parametrize("asked", FILTERS)
def test_an_empty_receive_takes_no_xid(db: psycopg.Connection[Any], asked: str) -> None:
    db.execute(f"select pgmb.create_queue('q', {asked})")
    publish(db, 101)
    drain(db, 51)
    publish(db, 30, every=1000, first=1)
    lease(db)
    with db.transaction():
        for _ in range(3):
            assert lease(db) == []
        assert db.execute("select pg_current_xact_id_if_assigned()").fetchall() == [(None,)]


# Trouble.


def test_a_failing_filter_is_no_trouble_to_status_or_to_others(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    db.execute(f"select pgmb.create_queue('q', {RAISING})")
    db.execute("select pgmb.create_queue('other', filter => '$.payload.n == 2')")
    publish(db, 5)
    db.execute("select pgmb.publish('t', '{\"n\": \"x\"}')")
    for paused in (False, True):
        assert db.execute("select pgmb.queue_depth('q'), pgmb.queue_depth('other')").fetchall() == [(None, 1)]
        health = dict(db.execute("select queue, waiting_for is not null from pgmb.queue_health()").fetchall())
        assert health == {"q": True, "other": True}
        status = db.execute(
            "select queue, waiting > 0, paused_at is not null from pgmb.queue_status"
        ).fetchall()
        assert status == [("other", True, False), ("q", True, paused)]
        assert lease(db) == []
    untimed = connect()
    assert untimed.execute("select pgmb.queue_depth('q'), pgmb.queue_depth('other')").fetchall() == [
        (None, 1)
    ]
    assert len(untimed.execute("select * from pgmb.queue_health()").fetchall()) == 2
    db.execute("select pgmb.rebase()")
    assert len(db.execute("select * from pgmb.receive('other')").fetchall()) == 1
    db.execute("select pgmb.bind('q', '{#}', no_filter => true), pgmb.resume('q')")
    assert db.execute("select count(*) from pgmb.receive('q')").fetchall() == [(6,)]


@pytest.mark.slow
def test_a_condition_that_is_slow_but_ends_moves_on(db: psycopg.Connection[Any]) -> None:
    """All events would not fit into the timeout: each call does what it can, and none fails."""
    slow = " + ".join(["factorial(400 + e.seq % 2)"] * 4)
    began = time.monotonic()
    db.execute(f"select from generate_series(1, 200) e (seq) where {slow} + e.seq < 0")
    for_all = (time.monotonic() - began) * 5
    db.execute(f"select pgmb.create_queue('q', condition => $${slow} + e.seq < 0$$)")
    db.execute("select pgmb.create_queue('far', condition => $$e.payload->>'n' = '999'$$)")
    publish(db, 1000)
    db.execute(f"set statement_timeout = '{for_all / 2 + 0.3:.1f}s'")
    places = [0]
    for _ in range(200):
        assert lease(db) == []
        places.append(place(db))
        # The last few are looked at again rather than written down.
        if places[-1] > 1000 - 64:
            break
        assert places[-1] > places[-2]
    assert places[-1] > 1000 - 64
    assert len(places) > 2, "one call was enough"
    assert "q" not in paused_queues(db)


def test_a_cancel_is_passed_on_and_pauses_nothing(db: psycopg.Connection[Any], connect: Connect) -> None:
    slow = " + ".join(["factorial((e.payload->>'n')::bigint)"] * 60)
    db.execute(f"select pgmb.create_queue('q', condition => $${slow} > 0$$)")
    db.execute("select pgmb.publish('t', '{\"n\": 32000}')")
    reader = connect()
    reader.execute("set statement_timeout = '600s'")
    failed: list[BaseException] = []

    def read() -> None:
        try:
            reader.execute("select * from pgmb.receive('q')")
        except psycopg.Error as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until = time.monotonic() + 60
    while not failed and time.monotonic() < until:
        db.execute(
            "select pg_cancel_backend(pid) from pg_stat_activity where pid = %s and query like '%%receive%%'"
            " and clock_timestamp() > query_start + interval '100 ms'",
            [reader.info.backend_pid],
        )
        thread.join(0.05)
    thread.join()
    assert [getattr(error, "sqlstate", None) for error in failed] == ["57014"]
    assert paused_queues(db) == {}


def test_an_old_snapshot_is_not_blamed_on_the_filter(db: psycopg.Connection[Any], connect: Connect) -> None:
    db.execute(f"select pgmb.create_queue('q', {FILTERS[1]})")
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read; set statement_timeout = '60s'")
    take_snapshot(old)
    publish(db, 10)
    with pytest.raises(psycopg.DatabaseError) as refused:
        lease(old)
    assert refused.value.sqlstate == "MB029"
    old.rollback()
    assert len(lease(db)) == 5
    assert paused_queues(db) == {}
