"""Leases under contention: takeover, settling and extending, each pair of them in both orders.

Promises: whoever loses a race is told (MB011) and changed nothing; whoever wins is never overtaken; nothing
is lost, and nothing that was settled comes again.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import queue_number, retries_waiting, until_swept


def lost() -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == "MB011")


def publish(session: Session, *numbers: int, topic: str = "t") -> None:
    for number in numbers:
        session.run("select pgmb.publish(%s, to_json(%s::int))", [topic, number])


def receive(session: Session, lease_for: str = "30 s", size: int = 100) -> tuple[Any, list[Any]]:
    rows = session.run("select lease, payload from pgmb.receive('q', %s, %s)", [size, lease_for])
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def attempts(session: Session) -> list[tuple[Any, int]]:
    return [
        (payload, attempt)
        for payload, attempt in session.run("select payload, attempt from pgmb.receive('q')")
    ]


def expire(session: Session) -> None:
    """Waits for the moment when every lease that is not for long has expired and the next sweep is due."""
    until_swept(session, retries=True)


@pytest.fixture
def queue(sessions: Sessions) -> Sessions:
    sessions["admin"].run("select pgmb.create_queue('q', backoff_jitter => 0)")
    return sessions


def test_an_ack_before_the_takeover_wins(queue: Sessions) -> None:
    """The lease has expired, but nobody has taken it over when the holder's transaction settles it."""
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    holder.run("begin")
    assert holder.value("select pgmb.ack(%s)", [lease]) == 1
    publish(other, 2)
    assert attempts(other) == [(2, 1)], "the takeover passes by what is being settled"
    holder.run("commit")
    expire(other)
    assert attempts(other) == []
    assert holder.value("select pgmb.ack(%s)", [lease]) == 0


def test_an_ack_rolled_back_after_the_takeover_passed_by_is_taken_over_later(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    holder.run("begin")
    holder.run("select pgmb.ack(%s)", [lease])
    publish(other, 2)
    assert attempts(other) == [(2, 1)]
    holder.run("rollback")
    assert attempts(other) == [(1, 2)], "the sweep remembers what it passed by"
    with lost():
        holder.run("select pgmb.ack(%s)", [lease])


@pytest.mark.parametrize(
    "settle", ["ack(%s)", "ack(%s, '{1}')", "retry(%s)", "retry(%s, '{1}')", "bury(%s)", "extend(%s)"]
)
def test_a_takeover_before_the_settlement_wins(queue: Sessions, settle: str) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    other.run("begin")
    assert attempts(other) == [(1, 2)]
    running = holder.start(f"select pgmb.{settle}", [lease])
    with lost():
        running.result(5)
    other.run("commit")
    with lost():
        holder.run(f"select pgmb.{settle}", [lease])
    assert holder.run("select from pgmb.dead") == []
    assert retries_waiting(holder) == 1


def test_a_takeover_that_rolled_back_leaves_the_lease_to_its_holder(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    other.run("begin")
    assert attempts(other) == [(1, 2)]
    other.run("rollback")
    assert holder.value("select pgmb.ack(%s)", [lease]) == 1
    assert attempts(other) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_extension_before_the_sweep_wins(queue: Sessions, end: str) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    holder.run("begin")
    holder.run("select pgmb.extend(%s, '1 hour')", [lease])
    publish(other, 2)
    assert attempts(other) == [(2, 1)]
    holder.run(end)
    assert attempts(other) == ([] if end == "commit" else [(1, 2)])
    if end == "commit":
        assert holder.value("select pgmb.ack(%s)", [lease]) == 1


def test_an_extension_that_ends_behind_the_sweep_is_still_taken_over(queue: Sessions) -> None:
    """The extension is short and commits after a sweep went past its new end: the lease must not hide
    there."""
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "1 ms")
    expire(holder)
    holder.run("begin")
    holder.run("select pgmb.extend(%s, '1 ms')", [lease])
    expire(other)
    publish(other, 2)
    assert attempts(other) == [(2, 1)]
    holder.run("commit")
    expire(other)
    assert attempts(other) == [(1, 2)]


def test_an_extension_racing_with_a_sweep_that_never_saw_it_expire(queue: Sessions) -> None:
    """The lease is extended, uncommitted, before it expires; it expires; the sweep passes; the extension
    ends."""
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder, "100 ms")
    holder.run("begin")
    holder.run("select pgmb.extend(%s, '200 ms')", [lease])
    until_swept(holder)
    publish(other, 2)
    assert (2, 1) in attempts(other)
    holder.run("commit")
    expire(other)
    assert attempts(other) == [(1, 2)]


def test_two_transactions_settle_parts_of_a_lease_at_once(queue: Sessions) -> None:
    one, two, other = queue.open("one", "two", "other")
    publish(one, 1, 2, 3, 4)
    lease, got = receive(one, "5 s")
    assert got == [1, 2, 3, 4]
    one.run("begin")
    two.run("begin")
    assert one.value("select pgmb.ack(%s, '{1}')", [lease]) == 1
    assert two.value("select pgmb.retry(%s, '{2}', '0 s')", [lease]) == 1
    assert two.value("select pgmb.bury(%s, '{3}', 'no')", [lease]) == 1
    two.run("commit")
    one.run("commit")
    assert attempts(other) == [(2, 2)]
    expire(other)
    assert attempts(other) == [(4, 2)]
    assert other.run("select payload, error from pgmb.dead_letters('q')") == [(3, "no")]


@pytest.mark.parametrize(("end", "count"), [("commit", 0), ("rollback", 1)])
def test_two_transactions_settle_the_same_event(queue: Sessions, end: str, count: int) -> None:
    one, two = queue.open("one", "two")
    publish(one, 1, 2)
    lease, _ = receive(one)
    one.run("begin")
    assert one.value("select pgmb.ack(%s, '{1}')", [lease]) == 1
    waiting = two.start("select pgmb.retry(%s, '{1}', '0 s')", [lease]).blocked()
    one.run(end)
    assert waiting.result() == [(count,)]
    assert attempts(two) == [(1, 2)] * count


@pytest.mark.parametrize(("end", "count"), [("commit", 0), ("rollback", 2)])
def test_two_transactions_settle_the_whole_lease(queue: Sessions, end: str, count: int) -> None:
    one, two = queue.open("one", "two")
    publish(one, 1, 2)
    lease, _ = receive(one)
    one.run("begin")
    assert one.value("select pgmb.ack(%s)", [lease]) == 2
    waiting = two.start("select pgmb.retry(%s, after => '0 s')", [lease]).blocked()
    one.run(end)
    assert waiting.result() == [(count,)]
    assert attempts(two) == [(1, 2), (2, 2)][:count]


def test_a_partial_settlement_survives_the_takeover_of_the_rest(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1, 2, 3)
    lease, _ = receive(holder, "1 ms")
    assert holder.value("select pgmb.ack(%s, '{1,3}')", [lease]) == 2
    expire(other)
    assert attempts(other) == [(2, 2)]
    with lost():
        holder.run("select pgmb.ack(%s, '{2}')", [lease])


def test_a_retry_lease_is_taken_over_and_fenced_in_the_same_way(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    publish(holder, 1)
    lease, _ = receive(holder)
    holder.run("select pgmb.retry(%s, after => '0 s')", [lease])
    second, got = receive(holder, "1 ms")
    assert got == [1]
    assert second != lease
    expire(holder)
    holder.run("begin")
    assert holder.value("select pgmb.extend(%s, '1 ms') is not null", [second])
    assert attempts(other) == [], "locked by the extension: passed by, without waiting"
    holder.run("commit")
    expire(other)
    assert attempts(other) == [(1, 3)]
    for settle in ("ack(%s)", "retry(%s)", "bury(%s)", "extend(%s)", "ack(%s, '{1}')"):
        with lost():
            holder.run(f"select pgmb.{settle}", [second])
    assert retries_waiting(other) == 1


def test_binding_anew_changes_nothing_that_is_in_flight(sessions: Sessions) -> None:
    admin, holder, other = sessions.open("admin", "holder", "other")
    admin.run("select pgmb.create_queue('q', '{a}')")
    publish(holder, 1, topic="a")
    publish(holder, 2, topic="b")
    publish(holder, 3, topic="a")
    lease, got = receive(holder, "1 ms")
    assert got == [1, 3]
    holder.run("begin")
    assert holder.value("select pgmb.ack(%s, '{3}')", [lease]) == 1
    admin.run("begin")
    admin.run("select pgmb.bind('q', '{b}')")
    publish(other, 4, topic="a")
    publish(other, 5, topic="b")
    assert other.value("select pgmb.retry(%s, '{1}', '0 s')", [lease]) == 1, "an open bind() blocks nobody"
    admin.run("commit")
    holder.run("rollback")
    expire(other)
    assert sorted(attempts(other)) == [(1, 2), (3, 2)], "the takeover reads by the patterns of its claim"
    assert attempts(other) == [(5, 1)]
    assert attempts(other) == []


def test_a_seek_ends_leases_and_fences_their_holders(queue: Sessions) -> None:
    admin, holder, other = queue.open("admin", "holder", "other")
    publish(holder, 1, 2)
    rows = holder.run("select lease, seq from pgmb.receive('q', 1)")
    retried, _ = receive(holder)
    holder.run("select pgmb.retry(%s, after => '0 s')", [retried])
    retried, got = receive(holder)
    assert got == [2]
    admin.run("select pgmb.seek('q', pgmb.earliest())")
    for lease in (rows[0][0], retried):
        for settle in ("ack(%s)", "ack(%s, '{1}')", "retry(%s)", "bury(%s)", "extend(%s)"):
            with lost():
                holder.run(f"select pgmb.{settle}", [lease])
    assert attempts(other) == [(1, 1), (2, 1)]
    assert attempts(other) == []


def test_a_lease_of_nothing_is_lost(queue: Sessions) -> None:
    session = queue["admin"]
    for lease in (UUID(int=0), UUID(int=2**128 - 1), UUID("000001ff-0000-0000-0000-000000000000")):
        for settle in ("ack(%s)", "ack(%s, '{1}')", "retry(%s)", "bury(%s)", "extend(%s)"):
            with lost():
                session.run(f"select pgmb.{settle}", [lease])


@pytest.mark.parametrize("form", ["", ", fair_by => 'key'"], ids=["plain", "fair"])
def test_who_waits_for_a_queue_that_is_dropped_is_told(sessions: Sessions, form: str) -> None:
    holder, other, admin = sessions.open("holder", "other", "admin")
    admin.run(f"select pgmb.create_queue('q'{form})")
    publish(admin, 1)
    holder.run("begin")
    receive(holder)
    admin.run("begin")
    assert admin.value("select pgmb.drop_queue('q')")
    waiting = other.start("select payload from pgmb.receive('q')").blocked()
    admin.run("commit")
    holder.run("rollback")
    with pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == "MB002"):
        waiting.result()


def test_who_supersedes_on_a_queue_that_is_dropped_is_told(queue: Sessions) -> None:
    other, admin = queue.open("other", "admin")
    number = queue_number(admin)
    admin.run("begin")
    assert admin.value("select pgmb.drop_queue('q')")
    opening = other.start(
        "select pgmb_internal.open_generation(%s, 1, clock_timestamp() + interval '20 seconds')", [number]
    ).blocked()
    admin.run("commit")
    with pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == "MB002"):
        opening.result()
