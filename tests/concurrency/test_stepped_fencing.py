"""Who may settle a lease is decided by rows and locks, never by how old it is.

Promises: of two consumers that were given the same event at most one can settle it, however their
transactions overlap; a lease is the holder's as a whole or not at all; an event that was acked does not come
again; nothing is left behind that no receive looks at.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import (
    end_behind_sweep,
    leases_behind_sweep,
    open_generations,
    rejuvenate_leases,
    supersede_often,
    until_leases_are_old,
    until_swept,
)
from harness.waiting import until_true

SETTLE = [
    "ack(%s)",
    "ack(%s, '{1}')",
    "retry(%s, after => '0 s')",
    "retry(%s, '{1}', '0 s')",
    "bury(%s)",
    "bury(%s, '{1}')",
    "release(%s)",
    "release(%s, '{1}')",
    "extend(%s)",
]
"""Every way to settle or prolong a lease whose first event has the number 1."""
PART = "retry(%s, '{1}', after => '0 s')"
WHOLE = ["retry(%s, after => '0 s')", "bury(%s)", "release(%s)"]


def raises(sqlstate: str) -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == sqlstate)


def publish(session: Session, *numbers: int, key: str | None = None, topic: str = "t") -> None:
    for number in numbers:
        session.run("select pgmb.publish(%s, to_json(%s::int), key => %s)", [topic, number, key])


def receive(session: Session, size: int = 100, lease_for: str = "30 s") -> tuple[Any, list[Any]]:
    rows = session.run("select lease, payload from pgmb.receive('q', %s, %s)", [size, lease_for])
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def settle(session: Session, how: str, lease: Any) -> Any:
    return session.value(f"select pgmb.{how}", [lease])


def retried(session: Session, *numbers: int, lease_for: str = "30 s") -> Any:
    """The lease of these events, delivered for the second time."""
    publish(session, *numbers)
    lease, _ = receive(session)
    session.run("select pgmb.retry(%s, after => '0 s')", [lease])
    lease, got = receive(session, lease_for=lease_for)
    assert got == list(numbers)
    return lease


@pytest.fixture
def queue(sessions: Sessions) -> Iterator[Sessions]:
    sessions["admin"].run("select pgmb.create_queue('q', backoff_jitter => 0)")
    sessions["admin"].run("create table effect (event int)")
    yield sessions
    for (name,) in sessions["admin"].run(
        "select gid from pg_prepared_xacts where database = current_database()"
    ):
        sessions["admin"].run(f"rollback prepared '{name}'")


# -- superseding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_consumers_that_hold_the_lock_in_turn_supersede_nobody(queue: Sessions, end: str) -> None:
    """The last one waits for longer than a second, but for no transaction that stays open for a second."""
    first, second, third, last = queue.open("first", "second", "third", "last")
    publish(last, 1, 2, 3, 4)
    for session in (first, second, third):
        session.start("begin")
        received = session.start("select payload from pgmb.receive('q', 1)")
        session.start("select pg_sleep(0.6)")
        session.start(end)
        if session is first:
            received.result()
        else:
            received.blocked()
    last.start("select payload from pgmb.receive('q', 1)").blocked()
    assert open_generations(last) == 0


def test_a_lease_begins_when_the_wait_for_the_lock_is_over(queue: Sessions) -> None:
    holder, waiter, other = queue.open("holder", "waiter", "other")
    publish(other, 1, 2)
    holder.run("begin")
    assert receive(holder, 1)[1] == [1]
    waiting = waiter.start("select payload from pgmb.receive('q', 1, '0.7 s')")
    waiting.blocked()
    holder.start("select pg_sleep(0.8)").result()
    holder.run("commit")
    assert waiting.result() == [(2,)]
    time.sleep(0.1)
    assert receive(other)[1] == [], "the waiter has just got its lease"


def test_what_another_is_taking_over_is_not_leased_twice(queue: Sessions) -> None:
    """The long one ends while another has opened a new generation and not committed it."""
    long, opener, third = queue.open("long", "opener", "third")
    publish(third, 1)
    long.run("begin")
    assert receive(long)[1] == [1]
    opener.run("begin")
    lease, got = receive(opener)
    assert got == [1]
    long.run("rollback")
    receiving = third.start("select lease, payload from pgmb.receive('q')")
    until_true(lambda: receiving.done() or third.waits_for_lock())
    assert settle(opener, "ack(%s)", lease) == 1
    opener.run("insert into effect values (1)")
    opener.run("commit")
    rejuvenate_leases(opener)
    for second, payload in receiving.result():
        third.run("begin")
        if settle(third, "ack(%s)", second):
            third.run("insert into effect values (%s)", [payload])
        third.run("commit")
    assert third.run("select event from effect") == [(1,)]


@pytest.mark.parametrize("how", SETTLE)
def test_a_superseded_lease_is_lost_however_young_it_is(queue: Sessions, how: str) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    long.run("begin")
    stale, got = receive(long)
    assert got == [1]
    lease, got = receive(other)
    assert got == [1]
    long.run("commit")
    rejuvenate_leases(other)
    with raises("MB011"):
        settle(long, how, stale)
    assert settle(other, "ack(%s)", lease) == 1
    assert receive(other) == (None, [])
    assert other.run("select from pgmb.dead") == []


@pytest.mark.parametrize("how", SETTLE)
def test_a_lease_that_another_may_be_taking_over_is_not_settled(queue: Sessions, how: str) -> None:
    """It is not decided yet whose the event is: the other's transaction is open."""
    long, opener = queue.open("long", "opener")
    publish(opener, 1)
    long.run("begin")
    stale, got = receive(long)
    assert got == [1]
    opener.run("begin")
    assert receive(opener)[1] == [1]
    long.run("commit")
    rejuvenate_leases(long)
    with raises("MB011"):
        settle(long, how, stale)
    opener.run("rollback")
    assert settle(long, how, stale), "nobody took it over"


def test_a_lease_that_the_opener_saw_is_settled_while_it_is_open(queue: Sessions) -> None:
    one, two, long, opener = queue.open("one", "two", "long", "opener")
    publish(one, 1, 2, 3)
    first, got = receive(one, 1)
    assert got == [1]
    assert receive(two, 1)[1] == [2]
    long.run("begin")
    assert receive(long)[1] == [3]
    opener.run("begin")
    assert receive(opener)[1] == [3]
    began = time.monotonic()
    assert settle(one, "ack(%s)", first) == 1, "another received after it, so it had committed before"
    assert time.monotonic() - began < 0.9
    opener.run("commit")
    long.run("rollback")


@pytest.mark.parametrize("how", ["ack(%s)", "ack(%s, '{1}')"])
def test_a_generation_that_was_skipped_hides_no_other(queue: Sessions, how: str) -> None:
    """Two generations are being opened, and the first of them is given up."""
    long, first, second = queue.open("long", "first", "second")
    publish(long, 1)
    long.run("begin")
    stale, _ = receive(long)
    first.run("begin")
    assert receive(first)[1] == [1]
    second.run("begin")
    lease, got = receive(second)
    assert got == [1]
    first.run("rollback")
    long.run("commit")
    with raises("MB011"):
        settle(long, how, stale)
    assert settle(second, "ack(%s)", lease) == 1
    second.run("commit")
    assert receive(first) == (None, [])


def test_a_generation_that_does_not_count_makes_nothing_void(queue: Sessions) -> None:
    """The first opener has not seen the long one's claim, the second goes on from it: it stands."""
    long, first, second = queue.open("long", "first", "second")
    publish(long, 1, 2)
    long.run("begin")
    lease, got = receive(long, 1)
    assert got == [1]
    first.run("begin")
    stale, got = receive(first, 1)
    assert got == [1]
    long.run("commit")
    other, got = receive(second, 1)
    assert got == [2], "it went on from what the long one has committed"
    first.run("commit")
    with raises("MB011"):
        settle(first, "ack(%s)", stale)
    assert settle(long, "ack(%s)", lease) == 1
    assert settle(second, "ack(%s)", other) == 1
    assert receive(first) == (None, [])


def test_a_prepared_transaction_that_settled_is_waited_for(queue: Sessions) -> None:
    prepared, other = queue.open("prepared", "other")
    publish(other, 1, 2)
    prepared.run("begin")
    lease, got = receive(prepared, 1)
    assert got == [1]
    assert settle(prepared, "ack(%s)", lease) == 1
    prepared.run("insert into effect values (1)")
    prepared.run("prepare transaction 'settled'")
    with raises("MB013"):
        receive(other)
    other.run("commit prepared 'settled'")
    assert receive(other)[1] == [2], "its effects and its ack are committed"


def test_leases_are_settled_after_any_number_of_supersessions(queue: Sessions) -> None:
    one, two = queue.open("one", "two")
    supersede_often(one, 70_000)
    for number, how in enumerate(SETTLE, 1):
        publish(one, number)
        lease, got = receive(one)
        assert got == [number]
        assert settle(one, how.replace("1", str(number)), lease)
        if how.startswith("extend"):
            assert settle(one, "ack(%s)", lease) == 1
        again, _ = receive(two)
        assert again is None or settle(two, "ack(%s)", again) == 1
    assert receive(one) == (None, [])


# -- leases of retried events --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [*SETTLE, "receive"])
def test_a_retry_lease_is_lost_as_a_whole(queue: Sessions, how: str) -> None:
    """Another takes one of its three events over: the holder has none of them any more."""
    holder, other = queue.open("holder", "other")
    lease = retried(holder, 1, 2, 3, lease_for="1 ms")
    until_swept(other)
    taken, got = receive(other, 1)
    assert got == [1]
    with raises("MB011"):
        if how == "receive":
            holder.run("select payload from pgmb.receive('q', ack => %s)", [lease])
        else:
            settle(holder, how.replace("{1}", "{2}"), lease)
    assert settle(other, "ack(%s)", taken) == 1
    rows = other.run("select payload, attempt from pgmb.receive('q')")
    assert rows == [(2, 3), (3, 3)]
    assert other.run("select from pgmb.dead") == []


@pytest.mark.parametrize("how", ["ack(%s)", "ack(%s, '{1}')", "extend(%s, '1 h')"])
def test_a_retry_lease_that_is_being_settled_is_not_taken_over(queue: Sessions, how: str) -> None:
    holder, other = queue.open("holder", "other")
    lease = retried(holder, 1, 2, lease_for="1 ms")
    until_swept(other)
    holder.run("begin")
    assert settle(holder, how, lease)
    assert receive(other) == (None, []), "not even what it does not settle"
    holder.run("rollback")
    assert receive(other)[1] == [1, 2]
    with raises("MB011"):
        settle(holder, how, lease)


def test_repeating_the_ack_of_a_retry_lease_changes_nothing(queue: Sessions) -> None:
    session = queue["holder"]
    lease = retried(session, 1, 2)
    assert settle(session, "ack(%s, '{1}')", lease) == 1
    assert settle(session, "ack(%s, '{1}')", lease) == 0
    assert settle(session, "ack(%s)", lease) == 1
    assert settle(session, "ack(%s)", lease) == 0


def test_a_superseded_receive_of_retried_events_gives_them_back(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    lease, _ = receive(other)
    other.run("select pgmb.retry(%s, after => '0 s')", [lease])
    long.run("begin")
    assert receive(long)[1] == [1]
    publish(other, 2)
    assert receive(other)[1] == [2], "others go on"
    with raises("MB011"):
        long.run("commit")
    assert other.run("select payload, attempt from pgmb.receive('q')") == [(1, 2)]


# -- parts of a lease and the whole of it --------------------------------------------------------------------


@pytest.mark.parametrize("of", ["fresh", "retried"])
@pytest.mark.parametrize("how", WHOLE)
def test_an_event_that_is_being_acked_does_not_come_again(queue: Sessions, how: str, of: str) -> None:
    """One transaction has acked an event of the lease when another gives the whole lease up."""
    part, whole, other = queue.open("part", "whole", "other")
    if of == "fresh":
        publish(part, 1, 2)
        lease, _ = receive(part)
    else:
        lease = retried(part, 1, 2)
    part.run("begin")
    assert settle(part, "ack(%s, '{1}')", lease) == 1
    giving_up = whole.start(f"select pgmb.{how}", [lease]).blocked()
    part.run("commit")
    assert giving_up.result() == [(1,)]
    assert receive(other)[1] == ([] if how.startswith("bury") else [2])
    assert [row[0] for row in other.run("select payload from pgmb.dead")] == (
        [2] if how.startswith("bury") else []
    )


@pytest.mark.parametrize("how", ["retry(%s, '{1}', '0 s')", "release(%s, '{1}')", "bury(%s, '{1}')"])
def test_an_ack_of_the_whole_counts_what_was_given_up_before(queue: Sessions, how: str) -> None:
    part, whole, other = queue.open("part", "whole", "other")
    publish(part, 1, 2)
    lease, _ = receive(part)
    part.run("begin")
    assert settle(part, how, lease) == 1
    acking = whole.start("select pgmb.ack(%s)", [lease]).blocked()
    part.run("commit")
    assert acking.result() == [(1,)]
    assert receive(other)[1] == ([] if how.startswith("bury") else [1])


def test_an_open_ack_of_a_part_does_not_keep_the_lease_from_being_extended(queue: Sessions) -> None:
    part, heart = queue.open("part", "heart")
    publish(part, 1, 2)
    lease, _ = receive(part)
    part.run("begin")
    assert settle(part, "ack(%s, '{1}')", lease) == 1
    assert settle(heart, "extend(%s, '1 h')", lease)
    part.run("commit")


def test_numbers_that_a_lease_does_not_hold_are_not_settled(sessions: Sessions) -> None:
    """They lie in its range, but are of another topic, or were rolled back."""
    admin, one, two = sessions.open("admin", "one", "two")
    admin.run("select pgmb.create_queue('q', '{a}', max_in_flight => 2)")
    publish(one, 1, topic="a")
    publish(one, 2, topic="b")
    two.run("begin")
    publish(two, 3, topic="a")
    two.run("rollback")
    publish(one, 4, topic="a")
    publish(one, 5, topic="a")
    lease, got = receive(one, 2)
    assert got == [1, 4]
    assert settle(one, "ack(%s, '{2,3,99}')", lease) == 0
    assert settle(one, "retry(%s, '{2,3,99}', '0 s')", lease) == 0
    assert receive(two) == (None, []), "two are in flight"
    assert settle(one, "ack(%s, '{1,2,3}')", lease) == 1
    assert settle(one, "ack(%s)", lease) == 1


def test_numbers_that_a_lease_does_not_hold_do_not_free_its_keys(sessions: Sessions) -> None:
    admin, one, two = sessions.open("admin", "one", "two")
    admin.run("select pgmb.create_queue('q', ordered => true, shards => 1)")
    publish(one, 1, key="a")
    publish(one, 2, key="b")
    publish(one, 3, key="a")
    lease, got = receive(one, 1)
    assert got == [1]
    until_leases_are_old(two)
    other, got = receive(two)
    assert got == [2]
    # 3 lies in the range of the second lease, but waits behind the first.
    assert settle(two, "ack(%s, '{1,3}')", other) == 0
    publish(one, 4, key="b")
    until_leases_are_old(two)
    assert receive(one) == (None, []), "both keys are held"
    assert settle(two, "ack(%s)", other) == 1
    assert receive(two)[1] == [4]
    assert settle(one, "ack(%s)", lease) == 1
    until_leases_are_old(two)
    assert receive(two)[1] == [3]


# -- ordered queues ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ack(%s, array[%s])", "ack(%s, array[%s])"),
        ("bury(%s, array[%s])", "ack(%s, array[%s])"),
        ("ack(%s, array[%s])", "bury(%s, array[%s])"),
    ],
)
def test_what_waits_behind_a_key_comes_when_its_parts_are_settled_at_once(
    sessions: Sessions, first: str, second: str
) -> None:
    """Each of two transactions settles one event of a key and cannot see that the other does."""
    admin, one, two = sessions.open("admin", "one", "two")
    admin.run("select pgmb.create_queue('q', ordered => true, shards => 1)")
    publish(one, 1, key="k")
    lease, got = receive(one)
    assert got == [1]
    publish(one, 2, 3, 4, key="k")
    until_leases_are_old(one)
    assert receive(two) == (None, []), "they wait behind the first"
    assert settle(one, "ack(%s)", lease) == 1
    rows = one.run("select lease, seq, payload from pgmb.receive('q', 2)")
    assert [payload for _, _, payload in rows] == [2, 3]
    one.run("begin")
    two.run("begin")
    assert one.value(f"select pgmb.{first}", rows[0][:2]) == 1
    assert two.value(f"select pgmb.{second}", rows[1][:2]) == 1
    one.run("commit")
    two.run("commit")
    until_leases_are_old(one)
    assert receive(one)[1] == [4]


# -- leases made shorter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["fresh", "retried"])
@pytest.mark.parametrize("lease_for", ["0 s", "-1 s", "1 ms"])
def test_a_lease_made_shorter_while_sweeps_pass_is_taken_over(
    queue: Sessions, lease_for: str, of: str
) -> None:
    holder, other = queue.open("holder", "other")
    if of == "fresh":
        publish(holder, 1)
        lease, _ = receive(holder)
    else:
        lease = retried(holder, 1)
    holder.run("begin")
    settle(holder, f"extend(%s, '{lease_for}')", lease)
    for number in (2, 3):
        until_swept(other)
        publish(other, number)
        assert receive(other)[1] == [number], "a sweep passed the new end"
    holder.run("commit")
    until_swept(other)
    assert receive(other)[1] == [1]
    with raises("MB011"):
        settle(holder, "ack(%s)", lease)
    assert leases_behind_sweep(other) == 0


@pytest.mark.parametrize("of", ["fresh", "retried"])
def test_two_extends_of_one_lease_lose_no_event(queue: Sessions, of: str) -> None:
    """The second one waits for the first and ends the lease sooner, while sweeps pass its end."""
    one, two, other = queue.open("one", "two", "other")
    if of == "fresh":
        publish(one, 1)
        lease, _ = receive(one, lease_for="1 ms")
    else:
        lease = retried(one, 1, lease_for="1 ms")
    one.run("begin")
    two.run("begin")
    settle(one, "extend(%s, '1 h')", lease)
    extending = two.start("select pgmb.extend(%s, '1 ms')", [lease]).blocked()
    one.run("commit")
    extending.result()
    for number in (2, 3):
        until_swept(other)
        publish(other, number)
        assert receive(other)[1] == [number], "a sweep passed the new end"
    two.run("commit")
    until_swept(other)
    assert receive(other)[1] == [1]
    with raises("MB011"):
        settle(one, "ack(%s)", lease)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("extend(%s, '0 s')", "ack(%s)"),
        ("extend(%s, '0 s')", "retry(%s, after => '0 s')"),
        ("extend(%s, '0 s')", PART),
        ("ack(%s)", "extend(%s, '0 s')"),
        (PART, "extend(%s, '0 s')"),
        ("retry(%s, after => '0 s')", "extend(%s, '0 s')"),
    ],
)
def test_an_extend_beside_another_call_loses_and_doubles_nothing(
    queue: Sessions, first: str, second: str, end: str
) -> None:
    """Sweeps pass while the first one is open; events of the lease come again unless they were acked."""
    one, two, other = queue.open("one", "two", "other")
    publish(one, 1, 2)
    lease, _ = receive(one)
    one.run("begin")
    settle(one, first, lease)
    waiting = two.start(f"select pgmb.{second}", [lease]).blocked()
    until_swept(other)
    publish(other, 3)
    assert receive(other)[1] == [3], "a sweep passed the new end"
    one.run(end)
    done = [first] if end == "commit" else []
    if end == "commit" and second.startswith("extend") and first != PART:
        with raises("MB011"):
            waiting.result()
    else:
        waiting.result()
        done.append(second)
    until_swept(other)
    again = [payload for _ in range(3) for payload in receive(other)[1]]
    assert sorted(again) == ([] if "ack(%s)" in done else [1] if done == [PART] else [1, 2])


@pytest.mark.parametrize("of", ["fresh", "retried"])
def test_maintain_finds_a_lease_that_every_sweep_passed(queue: Sessions, of: str) -> None:
    holder, other = queue.open("holder", "other")
    if of == "fresh":
        publish(holder, 1)
        lease, _ = receive(holder)
    else:
        lease = retried(holder, 1)
    until_swept(other)
    publish(other, 2)
    assert receive(other)[1] == [2]
    # By hand: no call leaves a lease behind the sweep.
    end_behind_sweep(other, lease)
    until_swept(other)
    publish(other, 3)
    assert receive(other)[1] == [3]
    other.run("select pgmb.maintain()")
    until_swept(other)
    assert receive(other)[1] == [1]
    with raises("MB011"):
        settle(holder, "ack(%s)", lease)


def test_a_lease_made_shorter_is_the_holders_until_then(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder)
    settle(holder, "extend(%s, '6 s')", lease)
    until_swept(other)
    assert receive(other) == (None, [])
    assert settle(holder, "ack(%s)", lease) == 1
    until_swept(other)
    publish(other, 2)
    assert receive(other)[1] == [2]
    until_true(lambda: receive(other) == (None, []) and leases_behind_sweep(other) == 0)


@pytest.mark.parametrize("lease_for", ["0 s", "-1 h"])
def test_a_lease_of_no_time_is_taken_over(queue: Sessions, lease_for: str) -> None:
    holder, other = queue.open("holder", "other")
    until_swept(holder)
    publish(holder, 1)
    assert receive(holder, lease_for=lease_for)[1] == [1]
    until_swept(other)
    assert receive(other)[1] == [1]
