"""Deliveries: what a dispatcher receives, what it says became of it, and what waits for one endpoint.

An event is matched once with all endpoints of a shared queue, and only what failed costs a row for each of
them. Nothing is lost, nothing is settled by one whose lease is lost, and nothing said twice counts twice.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import (
    add_deliveries,
    age_waiting,
    deliveries,
    deliveries_waiting,
    make_due,
    repeat_retries,
    retries,
    retries_waiting,
)
from tests.conftest import Connect
from tests.contract.deliveries import lost
from tests.contract.endpoints import (
    claim,
    create,
    dead,
    publish,
    receive,
    refused,
    settle,
    settle_claimed,
    value,
    waiting,
)


def expire(db: psycopg.Connection[Any], lease: UUID | None) -> None:
    """Has a lease of a queue run out, and waits until the next receive looks for such."""
    db.execute("select pgmb.extend(%s, '1 microsecond')", [lease])
    db.execute("select pg_sleep(0.06)")


def fail(seq: int, endpoint: UUID, after: str | None = "0", error: str = "no") -> Any:
    return (seq, endpoint, after, error, True, False)


def spent(seq: int, endpoint: UUID, error: str = "no") -> Any:
    return (seq, endpoint, None, error, True, True)


def test_an_event_comes_once_with_all_the_endpoints_that_it_is_for(db: psycopg.Connection[Any]) -> None:
    orders = create(db, "orders", "{order.*}")
    large = create(db, "large", "{order.*}", filter="$.payload > $least", params='{"least": 1}')
    everything = create(db, "everything")
    create(db, "off")
    db.execute("select pgmb.set_endpoint_state('off', 'disabled')")
    publish(db, 1, 2, topic="order.made")
    publish(db, 3, topic="invoice.made")
    got = receive(db)
    assert got.meant == {1: {orders, everything}, 2: {orders, large, everything}, 3: {everything}}
    assert got.attempts == {1: 1, 2: 1, 3: 1}
    assert settle(db, got.lease) == 3
    assert not receive(db)
    assert waiting(db) == dead(db) == []


def test_what_is_for_nobody_is_settled_on_the_way(db: psycopg.Connection[Any]) -> None:
    only = create(db, "only", "{b}")
    publish(db, 1, 2, topic="a")
    assert not receive(db)
    publish(db, 3, topic="a")
    publish(db, 4, topic="b")
    got = receive(db)
    assert got.meant == {4: {only}}
    expire(db, got.lease)
    assert receive(db).attempts == {4: 1}, "and is not among what comes again"


def test_what_failed_waits_for_that_endpoint_alone(db: psycopg.Connection[Any]) -> None:
    one, two = create(db, "one"), create(db, "two")
    publish(db, 1, 2, 3)
    got = receive(db)
    (first,), (second,), (third,) = got.seqs(1), got.seqs(2), got.seqs(3)
    # In two parts: the first while the rest is under way.
    assert settle(db, got.lease, [first], [fail(first, two, error="status 500")]) == 1
    untried = (second, one, "0", None, False, False)
    assert settle(db, got.lease, None, [untried, spent(third, two, "status 410")]) == 2
    assert waiting(db) == [(two, 1, 2, "status 500"), (one, 2, 1, None)]
    assert dead(db) == [(two, 3, 1, "status 410")]
    assert not receive(db)


@pytest.mark.parametrize("again", [False, True], ids=["first lease", "lease of retries"])
def test_a_failure_is_settled_while_other_endpoints_have_the_event(
    db: psycopg.Connection[Any], again: bool
) -> None:
    one, two = create(db, "one"), create(db, "two")
    publish(db, 1, 2)
    if again:
        expire(db, receive(db).lease)
    got = receive(db)
    assert settle(db, got.lease, [], [fail(got.seqs(1)[0], two), spent(got.seqs(2)[0], two)]) == 0
    assert settle(db, got.lease, [], [fail(got.seqs(1)[0], two), spent(got.seqs(2)[0], two)]) == 0
    assert waiting(db) == [(two, 1, 2, "no")], "said again, it changes nothing"
    assert dead(db) == [(two, 2, 1, "no")]
    assert list(claim(db)) == [1]
    assert settle(db, got.lease, None, [fail(got.seqs(1)[0], one)]) == 2
    assert set(waiting(db)) == {(one, 1, 2, "no"), (two, 1, 2, "no")}


def test_an_event_whose_lease_expired_does_not_come_to_endpoints_that_retry_it(
    db: psycopg.Connection[Any],
) -> None:
    one, two = create(db, "one"), create(db, "two")
    publish(db, 1, 2)
    got = receive(db)
    settle(db, got.lease, [], [fail(got.seqs(1)[0], two, "1 hour")])
    expire(db, got.lease)
    assert receive(db).meant == {1: {one}, 2: {one, two}}


@pytest.mark.parametrize("kind", ["shared", "own", "worker"])
def test_leases_of_killed_dispatchers_use_up_no_attempt(db: psycopg.Connection[Any], kind: str) -> None:
    queue = {"shared": "webhooks", "own": "endpoint/e", "worker": "q"}[kind]
    if kind == "worker":
        db.execute("select pgmb.create('q', 't', 1, pgmb.worker('e', 'http://localhost/', null))")
    else:
        create(db, "e", retry_after="{0 s}", batch=3 if kind == "own" else 1)
    db.execute("select pgmb.alter_queue(%s, max_attempts => 2)", [queue])
    publish(db, *range(6))
    for _ in range(4):
        leases = []
        while got := receive(db, queue):
            leases.append(got)
        assert sorted(name for got in leases for name in got.names) == list(range(6))
        assert {attempt for got in leases for attempt in got.attempts.values()} == {1}
        for got in leases:
            db.execute("select pgmb.extend(%s, '1 microsecond')", [got.lease])
        db.execute("select pg_sleep(0.06)")
    assert value(db, "select count(*) from pgmb.dead") == 0


def test_a_settlement_said_twice_counts_once(db: psycopg.Connection[Any]) -> None:
    """After a commit whose answer was lost it is said again."""
    one = create(db, "one")
    own = create(db, "own", batch=5)
    publish(db, 1, 2)
    got, its = receive(db), receive(db, "endpoint/own")
    for lease, endpoint, seqs in ((got.lease, one, got.seqs), (its.lease, own, its.seqs)):
        part = (seqs(1), [fail(seqs(1)[0], endpoint, "1 hour")])
        rest = (None, [fail(seqs(2)[0], endpoint, "1 hour")])
        assert settle(db, lease, *part) == 1
        assert settle(db, lease, *part) == 0
        assert settle(db, lease, *rest) == 1
        assert settle(db, lease, *rest) == 0
    assert [row[1] for row in waiting(db)] == [1, 2]
    assert retries_waiting(db) == 2


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_a_settlement_said_by_two_at_once_counts_once(
    db: psycopg.Connection[Any], sessions: Sessions, whole: bool
) -> None:
    one = create(db, "one")
    publish(db, 1, 2)
    got = receive(db)
    (seq,) = got.seqs(1)
    statement = (
        "select pgmb.settle_deliveries(%s, %s::bigint[], array[%s]::bigint[], array[%s]::uuid[], '{0 s}',"
        " '{no}', '{t}', '{f}')"
    )
    parameters = [got.lease, None if whole else [seq], seq, one]
    first, second = sessions.open("first", "second")
    first.run("begin")
    assert first.value(statement, parameters) == (2 if whole else 1)
    again = second.start(statement, parameters).blocked()
    first.run("commit")
    assert again.result() == [(0,)]
    assert len(waiting(db)) == 1


def test_a_lease_that_expired_is_taken_over_and_the_other_settles_nothing(
    db: psycopg.Connection[Any],
) -> None:
    one = create(db, "one")
    publish(db, 1, 2, 3)
    got = receive(db)
    settle(db, got.lease, got.seqs(1))
    expire(db, got.lease)
    again = receive(db)
    assert again.attempts == {2: 1, 3: 1}, "an expired lease is no attempt"
    with lost():
        settle(db, got.lease, None, [fail(got.seqs(2)[0], one)])
    with lost():
        settle(db, got.lease, got.seqs(3))
    assert waiting(db) == []
    assert settle(db, again.lease, again.seqs(2), [fail(again.seqs(2)[0], one)]) == 1
    assert waiting(db) == [(one, 2, 2, "no")]
    assert settle(db, again.lease, None, [spent(again.seqs(3)[0], one)]) == 1
    assert dead(db) == [(one, 3, 1, "no")]
    assert settle(db, again.lease) == 0, "said again, it changes nothing"


def test_without_a_time_the_queue_says_when_and_how_often(db: psycopg.Connection[Any]) -> None:
    one = create(db, "one", retry_after=None)
    db.execute("select pgmb.alter_queue('webhooks', max_attempts => 2, backoff_base => '1 hour')")
    publish(db, 1)
    got = receive(db)
    settle(db, got.lease, None, [fail(got.seqs(1)[0], one, None)])
    assert [1800 <= (event.due_in or 0) <= 5400 for event in deliveries(db)] == [True]
    make_due(db)
    held = claim(db)
    assert settle_claimed(db, held.lease, [], [(held.rows()[0], None, "again", True, False)]) == 1
    assert dead(db) == [(one, 1, 2, "again")]


@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "ordered"])
def test_an_endpoints_own_queue_tries_again_buries_and_gives_back(
    db: psycopg.Connection[Any], ordered: bool
) -> None:
    own = create(db, "own", ordered=ordered, batch=5, retry_after="{0 s}")
    keys = ["a", "b", "c", "d", None]
    for name, key in enumerate(keys):
        publish(db, name, key=key)
    seen: dict[int, int] = {}
    for _ in range(20):
        got = receive(db, "endpoint/own")
        for name in got.names:
            (seq,) = got.seqs(name)
            assert got.meant[name] == {own}
            outcome = {
                0: [],
                1: [fail(seq, own)],
                2: [spent(seq, own)],
                3: [(seq, own, "0", None, False, False)],
            }
            failures = outcome.get(name, []) if seen.get(name) is None else []
            assert settle(db, got.lease, [seq], failures) == 1
            seen[name] = got.attempts[name] if name in seen else seen.setdefault(name, 0)
        db.execute("select pg_sleep(0.11)" if ordered else "select")
        if set(seen) == {0, 1, 2, 3, 4} and retries_waiting(db) == 0:
            break
    assert seen == {0: 0, 1: 2, 2: 0, 3: 1, 4: 0}, (
        "tried again as the second attempt, given back as the first"
    )
    assert dead(db) == [(None, 2, 1, "no")]
    assert waiting(db) == []


def test_a_batch_that_failed_comes_again_as_it_was(db: psycopg.Connection[Any]) -> None:
    own = create(db, "own", batch=3, retry_after="{0 s,0 s}")
    publish(db, *range(6))
    got = receive(db, "endpoint/own")
    batches = [got.seqs(0, 1, 2), got.seqs(3, 4, 5)]
    failures = [
        fail(seq, own, after) for after, batch in zip(("0", "1 ms"), batches, strict=True) for seq in batch
    ]
    assert settle(db, got.lease, None, failures) == 6
    again = [receive(db, "endpoint/own"), receive(db, "endpoint/own")]
    assert [one.names for one in again] == [[0, 1, 2], [3, 4, 5]]
    assert settle(db, again[0].lease, None, [fail(seq, own) for seq in batches[0]]) == 3
    expire(db, again[1].lease)
    last = {tuple(receive(db, "endpoint/own").names) for _ in range(2)}
    assert last == {(0, 1, 2), (3, 4, 5)}


def test_behind_an_event_that_failed_those_of_its_key_wait(db: psycopg.Connection[Any]) -> None:
    own = create(db, "own", ordered=True, retry_after="{1 hour}")
    publish(db, 1, 2, key="a")
    publish(db, 3, key="b")
    leases = [receive(db, "endpoint/own", max=10)]
    while sum(len(got.names) for got in leases) < 3:
        db.execute("select pg_sleep(0.11)")
        leases.append(receive(db, "endpoint/own", max=10))
    for got in leases:
        failed = got.seqs(1)
        done = [seq for name in got.names if name != 2 for seq in got.seqs(name)]
        assert settle(db, got.lease, done, [fail(seq, own, "1 hour") for seq in failed]) == len(done)
        settle(db, got.lease)
    db.execute("select pg_sleep(0.11)")
    assert not receive(db, "endpoint/own")
    assert sorted((event.payload, event.attempt) for event in retries(db)) == [(1, 2), (2, 1)], (
        "the first was tried, the second was not"
    )


def test_a_workers_failures_come_one_by_one_with_the_queues_own_backoff(db: psycopg.Connection[Any]) -> None:
    worker = value(db, "select pgmb.worker('w', 'http://localhost/', null)")
    db.execute("select pgmb.create('q', 'a', 1, %s)", [worker])
    publish(db, 1, 2, topic="a")
    assert db.execute("select queue, endpoint from pgmb.dispatched_queues()").fetchall() == [("q", worker)]
    got = receive(db, "q")
    assert got.meant == {1: {worker}, 2: {worker}}
    settle(db, got.lease, None, [fail(seq, worker, None, "status 500") for seq in got.seqs(1, 2)])
    due = [(0.4 < (event.due_in or 0) <= 2, event.together) for event in retries(db)]
    assert due == [(True, None)] * 2
    make_due(db)
    got = receive(db, "q")
    assert got.attempts == {1: 2, 2: 2}
    settle(db, got.lease, None, [fail(seq, worker, None, "status 500") for seq in got.seqs(1, 2)])
    assert value(db, "select count(*) from pgmb.q_dead_letter_queue") == 2
    # Sent again while the first is still waiting, it is one event.
    db.execute("select pgmb.redrive('q')")
    repeat_retries(db)
    got = receive(db, "q")
    assert got.names == [1, 2]
    assert settle(db, got.lease) == 4
    assert not receive(db, "q")


def park(db: psycopg.Connection[Any], endpoints: dict[UUID, int]) -> None:
    """So many events wait for each endpoint, due, their payloads counting from 1."""
    first = 1
    for endpoint, events in endpoints.items():
        add_deliveries(db, events, endpoint=endpoint, first=first, error="before")
        first += events


def test_what_is_due_is_claimed_as_far_as_there_is_room(db: psycopg.Connection[Any]) -> None:
    one, two, three = (create(db, name) for name in ("one", "two", "three"))
    assert not claim(db)
    park(db, {one: 5, two: 5, three: 5})
    age_waiting(db, "-1 hour", seq=1)
    held = claim(db, room=2, rooms={two: 3, three: 0})
    assert {name: row[1] for name, row in held.items()} == {2: one, 3: one, 6: two, 7: two, 8: two}
    assert {row[2] for row in held.values()} == {2}
    assert list(claim(db, max=1, room=10, rooms={one: 0, two: 0})) == [11]
    assert list(claim(db, room=0, rooms={two: 1})) == [9]
    assert not claim(db, max=0)
    none_due = claim(db, room=10)
    assert sorted(none_due) == [4, 5, 10, 12, 13, 14, 15]
    before = value(db, "select pg_current_xact_id()::text::bigint")
    assert not claim(db)
    assert value(db, "select pg_current_xact_id()::text::bigint") == before + 1, (
        "an empty look writes nothing"
    )


def test_two_that_claim_at_once_get_different_rows(db: psycopg.Connection[Any], sessions: Sessions) -> None:
    one = create(db, "one")
    park(db, {one: 6})
    first, second = sessions.open("first", "second")
    take = "select payload::int from pgmb.claim_deliveries(100, '1 hour', 3) order by 1"
    first.run("begin")
    assert first.run(take) == [(1,), (2,), (3,)]
    assert second.run(take) == [(4,), (5,), (6,)]
    assert second.run(take) == []
    first.run("rollback")
    assert second.run(take) == [(1,), (2,), (3,)]


def test_only_active_endpoints_are_served_unless_they_are_named(db: psycopg.Connection[Any]) -> None:
    one, two, three = (create(db, name) for name in ("one", "two", "three"))
    park(db, {one: 2, two: 2, three: 2})
    db.execute("select pgmb.set_endpoint_state('one', 'paused')")
    db.execute("select pgmb.trip_endpoint(%s, 'x')", [two])
    db.execute("select pgmb.disable_endpoint(%s, 'x')", [three])
    assert not claim(db)
    assert list(claim(db, rooms={two: 1})) == [3]


def test_claimed_rows_are_settled_by_their_lease_alone(db: psycopg.Connection[Any]) -> None:
    one = create(db, "one")
    park(db, {one: 5})
    held = claim(db, lease_for="1 microsecond")
    assert held.lease is not None
    db.execute("select pgmb.extend_claimed(%s, '1 microsecond')", [[held.lease]])
    again = claim(db, max=3)
    assert {row[2] for row in again.values()} == {2}, "an expired lease is no attempt"
    kept, stolen = [name for name in held if name not in again], list(again)
    failures = [(row, "0", "late", True, False) for row in held.rows(*stolen[:2])]
    assert settle_claimed(db, held.lease, held.rows(kept[0], stolen[2]), failures) == 1
    assert deliveries_waiting(db) == 4
    assert value(db, "select pgmb.extend_claimed(%s, '1 hour')", [held.lease]) == held.lease

    rows = again.rows(*stolen)
    outcome = [(rows[1], "1 hour", "status 500", True, False), (rows[2], None, "status 410", True, True)]
    assert settle_claimed(db, again.lease, rows[:1], outcome) == 3
    assert settle_claimed(db, again.lease, rows[:1], outcome) == 0, "said again, it changes nothing"
    assert waiting(db) == sorted(
        [(one, kept[1], 2, "before"), (one, stolen[1], 3, "status 500")], key=lambda row: row[1]
    )
    assert dead(db) == [(one, stolen[2], 2, "status 410")]
    (later,) = [event for event in deliveries(db) if event.attempt == 3]
    assert not later.leased
    assert later.due_in is not None
    assert later.due_in > 0


def test_what_was_not_posted_waits_without_counting(db: psycopg.Connection[Any]) -> None:
    one = create(db, "one")
    park(db, {one: 1})
    held = claim(db)
    settle_claimed(db, held.lease, [], [(held.rows()[0], None, None, False, False)])
    assert waiting(db) == [(one, 1, 2, "before")]
    assert list(claim(db)) == [1]


def test_a_dead_letter_goes_back_to_the_endpoint_that_it_is_of(db: psycopg.Connection[Any]) -> None:
    one, two = create(db, "one"), create(db, "two")
    publish(db, 1, 2)
    got = receive(db)
    settle(
        db, got.lease, None, [spent(got.seqs(1)[0], one), *(spent(got.seqs(2)[0], by) for by in (one, two))]
    )
    letters = {
        (row[1], row[2]): row[0]
        for row in db.execute(
            "select id, payload::text::int, endpoint from pgmb.dead_letters('webhooks')"
        ).fetchall()
    }
    assert letters.keys() == {(1, one), (2, one), (2, two)}
    assert value(db, "select pgmb.redrive('webhooks', %s)", [letters[1, one], letters[2, two]]) == 2
    assert waiting(db) == [(one, 1, 1, "no"), (two, 2, 1, "no")]
    assert {row[2] for row in claim(db).values()} == {1}
    assert len(dead(db)) == 1


def test_a_queue_that_is_moved_takes_what_waited_along(db: psycopg.Connection[Any], connect: Connect) -> None:
    one = create(db, "one")
    park(db, {one: 2})
    publish(db, 1)
    assert value(db, "select retries from pgmb.queue_status where queue = 'webhooks'") == 2
    assert value(db, "select pgmb.queue_depth('webhooks')") == 3
    with refused("MB004"):
        db.execute("select pgmb.drop_queue('webhooks')")
    got = receive(db)
    db.execute("select pgmb.seek('webhooks', pgmb.earliest())")
    assert waiting(db) == []
    with lost():
        settle(db, got.lease)
    assert receive(db).names == [1]
    park(db, {one: 2})
    db.execute("select pgmb.purge('webhooks')")
    assert waiting(db) == []
    assert not receive(db)
