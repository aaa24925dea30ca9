"""What dispatchers share: who lives, how many requests are left, which endpoints failed too often.

Limits hold over all of them, one of them probes, and none waits for another for long.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pgmb.testing import FrozenClock
from tests.contract.endpoints import create, publish, receive, refused, settle, value


def heartbeat(
    db: psycopg.Connection[Any], dispatcher: UUID, *did: tuple[UUID, int, int, str | None]
) -> list[UUID]:
    columns = [list(column) for column in zip(*did, strict=True)] or [[], [], [], []]
    living: list[UUID] = value(
        db,
        "select pgmb.heartbeat(%s, 'host', 7, %s::uuid[], %s::bigint[], %s::bigint[], %s::text[])",
        dispatcher,
        *columns,
    )
    return living


def activity(db: psycopg.Connection[Any], name: str, columns: str) -> Any:
    (row,) = db.execute(f"select {columns} from pgmb.endpoints where name = %s", [name]).fetchall()
    return row


def published(db: psycopg.Connection[Any]) -> list[Any]:
    return db.execute("select topic, key, payload from pgmb.log_main order by seq").fetchall()


def test_dispatchers_know_of_each_other_while_they_live(db: psycopg.Connection[Any]) -> None:
    one, two = sorted((uuid4(), uuid4()))
    create(db, "hook")
    assert value(db, "select last_heartbeat from pgmb.workers") is None
    assert heartbeat(db, one) == [one]
    assert heartbeat(db, two) == [one, two]
    assert value(db, "select last_heartbeat > now() - interval '1 min' from pgmb.workers") is True
    with FrozenClock(db.info.dsn) as clock:
        clock.advance(11)
        assert heartbeat(db, two) == [two]
        assert value(db, "select count(*) from pgmb.dispatcher") == 2
        clock.advance(3601)
        assert heartbeat(db, two) == [two]
        assert value(db, "select count(*) from pgmb.dispatcher") == 1, "one that is long gone is forgotten"
    assert heartbeat(db, one) == [one, two]
    db.execute("select pgmb.depart(%s)", [two])
    assert heartbeat(db, one) == [one]
    assert db.execute("select id, host, pid from pgmb.dispatcher").fetchall() == [(one, "host", 7)]


def test_a_heartbeat_says_what_endpoints_did(db: psycopg.Connection[Any]) -> None:
    hook, other, me = create(db, "hook"), create(db, "other"), uuid4()
    heartbeat(db, me, (hook, 3, 0, None), (other, 0, 1, "timeout"))
    heartbeat(db, me, (hook, 2, 1, "status 500"), (uuid4(), 1, 1, None))
    told = "delivered, failed, delivered_at is null, failed_at is null, failing_since is null, error"
    assert activity(db, "hook", told) == (5, 1, False, False, True, "status 500")
    assert activity(db, "other", told) == (0, 1, True, False, False, "timeout")
    since = activity(db, "other", "failing_since")
    heartbeat(db, me, (other, 0, 5, "refused"))
    assert activity(db, "other", "failing_since") == since
    heartbeat(db, me, (other, 1, 5, None))
    assert activity(db, "other", "failing_since, error") == (None, None), "its newest request succeeded"


def test_one_that_failed_for_days_is_disabled_and_an_event_says_so(db: psycopg.Connection[Any]) -> None:
    hook, held, me = create(db, "hook"), create(db, "held"), uuid4()
    db.execute("select pgmb.set_endpoint_state('held', 'paused')")
    heartbeat(db, me, (hook, 0, 1, "status 500"), (held, 0, 1, "status 500"))
    with FrozenClock(db.info.dsn) as clock:
        clock.advance(5 * 86400 - 600)
        heartbeat(db, me, (hook, 0, 1, "status 502"))
        assert activity(db, "hook", "state") == ("active",)
        clock.advance(1200)
        heartbeat(db, me)
        assert activity(db, "hook", "state") == ("active",), "only one that fails still"
        heartbeat(db, me, (hook, 0, 1, "status 503"), (held, 0, 1, "status 503"))
        state, reason = activity(db, "hook", "state, reason")
        assert state == "disabled"
        assert reason.startswith("failed since ")
        assert activity(db, "held", "state") == ("paused",)
        ((topic, key, payload),) = published(db)
        assert (topic, key) == ("pgmb.endpoint.disabled", "hook")
        assert payload == {"endpoint": str(hook), "name": "hook", "url": payload["url"], "reason": reason}
        heartbeat(db, me, (hook, 0, 1, "status 503"))
        assert len(published(db)) == 1, "once"


def test_one_that_is_gone_is_disabled_once(db: psycopg.Connection[Any]) -> None:
    hook = create(db, "hook")
    for _ in range(2):
        db.execute("select pgmb.disable_endpoint(%s, '410 Gone')", [hook])
    assert activity(db, "hook", "state, reason") == ("disabled", "410 Gone")
    assert [event[2]["reason"] for event in published(db)] == ["410 Gone"]
    assert not receive(db), "nor is it told that it is off"


def test_a_full_queue_does_not_keep_it_from_being_disabled(db: psycopg.Connection[Any]) -> None:
    hook = create(db, "hook")
    db.execute("select pgmb.create_queue('short', max_length => 1)")
    with refused("MB040"):
        publish(db, *range(10))
    db.execute("select pgmb.disable_endpoint(%s, '410 Gone')", [hook])
    assert activity(db, "hook", "state") == ("disabled",)


def test_a_tripped_endpoint_waits_longer_each_time(db: psycopg.Connection[Any]) -> None:
    hook = create(db, "hook")
    trip = "select round(extract(epoch from pgmb.trip_endpoint(%s, 'status 500') - clock_timestamp()))::int"
    probe = "select pgmb.probe_endpoint(%s, '20 s')"
    with FrozenClock(db.info.dsn) as clock:
        assert value(db, probe, hook) is False, "it is active"
        assert value(db, trip, hook) == 10
        assert activity(db, "hook", "state, reason") == ("tripped", "status 500")
        assert value(db, trip, hook) == 10, "another found the same"
        assert value(db, probe, hook) is False, "not yet"
        waits: list[int] = []
        for _ in range(7):
            clock.advance(300)
            assert value(db, probe, hook) is True
            assert value(db, probe, hook) is False, "one at a time"
            db.execute("select pgmb.end_probe(%s, false, 'timeout')", [hook])
            left = "select round(extract(epoch from probe_at - clock_timestamp()))::int from pgmb.endpoints"
            waits.append(value(db, left))
        assert waits == [20, 40, 80, 160, 300, 300, 300]
        clock.advance(301)
        assert value(db, probe, hook) is True
        db.execute("select pgmb.end_probe(%s, null)", [hook])
        clock.advance(2)
        assert value(db, probe, hook) is True, "there was nothing to try it with"
        clock.advance(21)
        assert value(db, probe, hook) is True, "whoever was at it died"
        db.execute("select pgmb.end_probe(%s, true)", [hook])
        assert activity(db, "hook", "state, reason, probe_at") == ("active", None, None)
        assert value(db, trip, hook) == 10, "and begins anew"
        db.execute("select pgmb.set_endpoint_state('hook', 'paused', 'holiday')")
        db.execute("select pgmb.end_probe(%s, true)", [hook])
        assert value(db, trip, hook) is None
        assert activity(db, "hook", "state, reason") == ("paused", "holiday"), "an operator's word stands"


def test_one_of_many_probes(db: psycopg.Connection[Any], dsn: str) -> None:
    hook = create(db, "hook")
    db.execute("select pgmb.trip_endpoint(%s, 'x', '0 s')", [hook])
    together = threading.Barrier(8)

    def probe(_: int) -> bool:
        with psycopg.connect(dsn, autocommit=True) as connection:
            together.wait(30)
            return bool(value(connection, "select pgmb.probe_endpoint(%s, '1 min')", hook))

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(probe, range(8))) == [False] * 7 + [True]


def take(db: psycopg.Connection[Any], wanted: dict[UUID, int]) -> dict[UUID, int]:
    return dict(
        db.execute(
            "select endpoint, given from pgmb.take_requests(%s, %s::integer[])",
            [list(wanted), list(wanted.values())],
        ).fetchall()
    )


def test_requests_are_given_as_the_limit_allows(db: psycopg.Connection[Any]) -> None:
    fast, slow, free = create(db, "fast", rps=50), create(db, "slow", rps=1), create(db, "free")
    with FrozenClock(db.info.dsn) as clock:
        assert take(db, {fast: 10, slow: 10, free: 10, uuid4(): 1}) == {fast: 10, slow: 1}
        clock.hold()
        assert 15 <= take(db, {fast: 100})[fast] <= 16 + 50, "what half a second gives is kept"
        clock.advance(0.1)
        given = take(db, {fast: 100, slow: 1})
        assert given[fast] >= 5
        assert given[slow] == 0
        clock.advance(100)
        given = take(db, {fast: 1000, slow: 1000})
        assert given == {fast: 25, slow: 1}, "and no more than that"
    assert take(db, {fast: -1, slow: 0}) == {fast: 0, slow: 0}
    assert db.execute("select * from pgmb.take_requests(%s, %s)", [[fast, fast], [0, 0]]).fetchall() == [
        (fast, 0)
    ]


def test_three_that_take_at_once_get_no_more_than_the_limit(db: psycopg.Connection[Any], dsn: str) -> None:
    """Two endpoints, named in either order: nobody waits for ever. Seconds pass in steps."""
    one, two = create(db, "one", rps=50), create(db, "two", rps=50)
    total = {one: 0, two: 0}
    lock, steps, seconds = threading.Lock(), 40, 10.0
    begun = value(db, "select clock_timestamp()")

    def run(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for step in range(steps):
                order = (one, two) if (number + step) % 2 else (two, one)
                for endpoint, given in take(connection, dict.fromkeys(order, 7)).items():
                    with lock:
                        total[endpoint] += given
                # A quarter of a second passes for all three: a third of it is this one's.
                with connection.transaction():
                    connection.execute("select from pgmb.endpoint_activity order by endpoint for update")
                    connection.execute(
                        "update pgmb.endpoint_activity set paid_until = paid_until - %s * interval '1 s'",
                        [seconds / steps / 3],
                    )

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    passed = seconds + value(db, "select extract(epoch from clock_timestamp() - %s)::float", begun)
    for given in total.values():
        assert 0.6 * 50 * seconds <= given <= 50 * (passed + 0.5) + 1


def test_attempts_are_written_down_and_cleared_by_age(db: psycopg.Connection[Any]) -> None:
    hook, event = create(db, "hook"), uuid4()
    db.execute(
        "select pgmb.log_attempts(%s, %s::bigint[], %s, %s::text[], %s::int[], %s::int[], %s::real[],"
        " %s::text[], %s::text[], %s::text[])",
        [
            [hook, hook, uuid4()],
            [1, 1, 1],
            [event] * 3,
            ["t"] * 3,
            [1, 2, 1],
            [500, None, 500],
            [0.5, 15.0, 1.0],
            ["status", "timeout", "status"],
            ["x" * 1000, None, None],
            ["é" * 5000, None, None],
        ],
    )
    rows = db.execute(
        "select event_id, attempt, status, seconds, error, length(detail), length(response) from pgmb.attempt"
        " order by id"
    ).fetchall()
    assert rows == [(event, 1, 500, 0.5, "status", 500, 1024), (event, 2, None, 15.0, "timeout", None, None)]
    with FrozenClock(db.info.dsn) as clock:
        clock.advance(6 * 86400)
        db.execute("select pgmb.maintain()")
        assert value(db, "select count(*) from pgmb.attempt") == 2
        clock.advance(86400)
        assert value(db, "select pgmb_internal.clear_attempts('7 days', 1)") == 1
        db.execute("select pgmb.maintain()")
        assert value(db, "select count(*) from pgmb.attempt") == 0


def test_time_passes_for_what_waits_too(db: psycopg.Connection[Any]) -> None:
    """The clock of pgmb.testing moves all that endpoints wait for."""
    hook = create(db, "hook")
    publish(db, 1)
    got = receive(db)
    settle(db, got.lease, None, [(got.seqs(1)[0], hook, "1 hour", "no", True, False)])
    db.execute("select pgmb.add_endpoint_secret('hook', 'one')")
    db.execute("select pgmb.add_endpoint_secret('hook', 'two', '1 hour')")
    with FrozenClock(db.info.dsn) as clock:
        clock.advance(3500)
        assert db.execute("select * from pgmb.claim_deliveries()").fetchall() == []
        assert activity(db, "hook", "secrets") == (2,)
        clock.advance(200)
        assert len(db.execute("select * from pgmb.claim_deliveries()").fetchall()) == 1
        assert activity(db, "hook", "secrets") == (1,)


@pytest.mark.parametrize("paused", [False, True])
def test_queues_that_feed_nobody_or_are_paused_are_not_dispatched(
    db: psycopg.Connection[Any], paused: bool
) -> None:
    create(db, "hook")
    own = create(db, "own", ordered=True)
    db.execute("select pgmb.create_queue('plain')")
    db.execute("select pgmb.create('lost', 'a', 5, gen_random_uuid())")
    if paused:
        db.execute("select pgmb.pause('webhooks')")
        db.execute("select pgmb.pause('endpoint/own')")
    found = set(db.execute("select queue, endpoint from pgmb.dispatched_queues()").fetchall())
    assert found == (set() if paused else {("webhooks", None), ("endpoint/own", own)})
