"""A receive belongs in a short transaction. In a long one it stalls nobody, and nothing is lost by it.

Promises: the queue's other consumers go on within about a second; the long one's lease is then void: a
later ack raises MB011, and a commit that already acked is refused; its rollback leaves nothing lost. A
caller with a stale snapshot is told to try again (40001) or that it is behind (MB022), never given a wrong
answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import open_generations, remove_next_generations, take_snapshot
from harness.waiting import until_true

ABOUT_A_SECOND = 3.0


def raises(sqlstate: str) -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == sqlstate)


def publish(session: Session, *numbers: int) -> None:
    for number in numbers:
        session.run("select pgmb.publish('t', to_json(%s::int))", [number])


def receive(session: Session, size: int = 100) -> tuple[Any, list[Any]]:
    rows = session.run("select lease, payload from pgmb.receive('q', %s)", [size])
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def ack(session: Session, lease: Any) -> int:
    return int(session.value("select pgmb.ack(%s)", [lease]))


def drain(session: Session) -> list[Any]:
    payloads: list[Any] = []
    while (got := receive(session))[0] is not None:
        assert ack(session, got[0]) == len(got[1])
        payloads += got[1]
    return payloads


@pytest.fixture
def queue(sessions: Sessions) -> Iterator[Sessions]:
    sessions["admin"].run("select pgmb.create_queue('q', backoff_jitter => 0)")
    yield sessions
    for (name,) in sessions["admin"].run(
        "select gid from pg_prepared_xacts where database = current_database()"
    ):
        sessions["admin"].run(f"rollback prepared '{name}'")


def test_others_go_on_within_about_a_second_and_then_at_once(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1, 2)
    long.run("begin")
    assert receive(long, 1)[1] == [1]
    began = time.monotonic()
    lease, got = receive(other, 1)
    assert got == [1]
    assert time.monotonic() - began < ABOUT_A_SECOND
    ack(other, lease)
    began = time.monotonic()
    for number in range(3, 13):
        publish(other, number)
        lease, _ = receive(other, 1)
        ack(other, lease)
    # Ten that each waited would take ten seconds.
    assert time.monotonic() - began < 5, "only the first one waits"
    long.run("rollback")
    assert drain(other) == [12]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_long_ones_lease_is_void(queue: Sessions, end: str) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    long.run("begin")
    stale, got = receive(long)
    assert got == [1]
    lease, got = receive(other)
    assert got == [1]
    long.run(end)
    for settle in ("ack(%s)", "ack(%s, '{1}')", "retry(%s)", "bury(%s)", "extend(%s)"):
        with raises("MB011"):
            long.run(f"select pgmb.{settle}", [stale])
    assert ack(other, lease) == 1
    publish(long, 2)
    assert drain(long) == [2]


@pytest.mark.parametrize(
    "settle", ["ack(%s)", "ack(%s, '{1}')", "retry(%s, after => '0 s')", "bury(%s)", "extend(%s)"]
)
def test_a_commit_that_received_and_settled_is_refused(queue: Sessions, settle: str) -> None:
    long, other = queue.open("long", "other")
    long.run("create table effect (of int)")
    publish(other, 1)
    long.run("begin")
    stale, _ = receive(long)
    long.run(f"select pgmb.{settle}", [stale])
    long.run("insert into effect values (1)")
    lease, got = receive(other)
    assert got == [1]
    with raises("MB011"):
        long.run("commit")
    assert other.run("select * from effect") == []
    assert ack(other, lease) == 1
    assert drain(other) == []
    assert other.run("select from pgmb.dead") == []


def test_the_long_one_is_refused_at_its_ack_too(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    long.run("begin")
    stale, _ = receive(long)
    assert drain(other) == [1]
    with raises("MB011"):
        ack(long, stale)
    long.run("rollback")
    assert drain(long) == []


def test_a_transaction_that_nobody_superseded_commits_however_long_it_took(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    long.run("begin")
    lease, _ = receive(long)
    assert ack(long, lease) == 1
    long.run("select pg_sleep(1.2)")
    long.run("commit")
    assert drain(other) == []


def test_the_long_one_may_receive_again_in_the_new_generation(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    publish(other, 1)
    long.run("begin")
    assert receive(long)[1] == [1]
    assert drain(other) == [1]
    publish(other, 2)
    lease, got = receive(long)
    assert got == [2]
    assert ack(long, lease) == 1
    long.run("commit")
    publish(other, 3)
    assert drain(other) == [3]


def test_superseded_twice(queue: Sessions) -> None:
    first, second, third = queue.open("first", "second", "third")
    publish(third, 1, 2)
    first.run("begin")
    one, got = receive(first, 1)
    assert got == [1]
    second.run("begin")
    two, got = receive(second, 1)
    assert got == [1]
    three, got = receive(third, 1)
    assert got == [1]
    first.run("commit")
    second.run("commit")
    for session, lease in ((first, one), (second, two)):
        with raises("MB011"):
            ack(session, lease)
    assert ack(third, three) == 1
    assert drain(first) == [2]
    assert open_generations(first) == 2


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_generation_that_another_session_opens_is_waited_for(queue: Sessions, end: str) -> None:
    """Two that opened one each would both go on from the same position."""
    long, opener, third = queue.open("long", "opener", "third")
    publish(third, 1, 2)
    long.run("begin")
    assert receive(long, 1)[1] == [1]
    opener.run("begin")
    assert receive(opener, 1)[1] == [1], "in a generation that others do not see yet"
    waiting = third.start("select payload from pgmb.receive('q', 1)").blocked()
    # For the long one it waits a few milliseconds.
    until_true(lambda: waiting.blocked_by() == [opener.pid])
    opener.run(end)
    assert waiting.result() == [(2 if end == "commit" else 1,)]
    assert open_generations(third) == 1
    long.run("rollback")


def test_a_receive_that_cannot_open_a_generation_says_so(queue: Sessions) -> None:
    """The row of the next generation may be missing while the transaction that adds it stays open."""
    long, other = queue.open("long", "other")
    publish(long, 1)
    long.run("begin")
    assert receive(long)[1] == [1]
    remove_next_generations(other)
    other.run("set statement_timeout = '20s'")
    with raises("MB013"):
        receive(other)
    long.run("rollback")
    assert drain(other) == [1]


def test_long_transactions_in_a_row_leave_generations_for_the_next(queue: Sessions) -> None:
    """Each adds a row for a later generation, which others see only after its commit."""
    *long, last = queue.open("one", "two", "three", "four", "five", "last")
    publish(last, 1)
    for session in long:
        session.run("begin")
        assert receive(session)[1] == [1]
    lease, got = receive(last)
    assert got == [1]
    assert ack(last, lease) == 1
    for session in long:
        session.run("rollback")
    assert drain(last) == []


def test_a_superseder_that_rolls_back_changes_nothing(queue: Sessions) -> None:
    long, second = queue.open("long", "second")
    publish(long, 1, 2)
    long.run("begin")
    lease, got = receive(long, 1)
    assert got == [1]
    second.run("begin")
    assert receive(second, 1)[1] == [1]
    second.run("rollback")
    long.run("commit")
    assert ack(long, lease) == 1
    assert drain(second) == [2]


def test_superseded_events_are_not_lost_though_the_other_received_retries(queue: Sessions) -> None:
    """Retries come first and move no position: the void claim must not become the queue's position."""
    long, other = queue.open("long", "other")
    publish(other, 1)
    lease, _ = receive(other)
    publish(other, 2)
    long.run("begin")
    assert receive(long)[1] == [2]
    other.run("select pgmb.retry(%s, after => '0 s')", [lease])
    assert receive(other)[1] == [1]
    long.run("commit")
    assert drain(other) == [2]


def test_two_queues_received_crosswise_do_not_deadlock(queue: Sessions) -> None:
    one, two = queue.open("one", "two")
    one.run("select pgmb.create_queue('r')")
    publish(one, 1)
    one.run("begin")
    two.run("begin")
    assert one.run("select payload from pgmb.receive('q')") == [(1,)]
    assert two.run("select payload from pgmb.receive('r')") == [(1,)]
    first = one.start("select payload from pgmb.receive('r')").blocked()
    second = two.start("select payload from pgmb.receive('q')")
    assert first.result() == [(1,)]
    assert second.result() == [(1,)]
    one.run("commit")
    two.run("commit")


def test_a_long_receive_is_void_only_in_its_own_queue(queue: Sessions) -> None:
    long, other = queue.open("long", "other")
    long.run("select pgmb.create_queue('r')")
    publish(other, 1)
    long.run("begin")
    receive(long)
    rows = long.run("select lease from pgmb.receive('r')")
    assert drain(other) == [1]
    long.run("commit")
    assert ack(long, rows[0][0]) == 1


def test_a_prepared_receive_is_superseded_and_nothing_is_lost(queue: Sessions) -> None:
    prepared, other = queue.open("prepared", "other")
    publish(other, 1)
    prepared.run("begin")
    stale, got = receive(prepared)
    assert got == [1]
    prepared.run("prepare transaction 'receive'")
    lease, got = receive(other)
    assert got == [1]
    other.run("commit prepared 'receive'")
    with raises("MB011"):
        ack(prepared, stale)
    assert ack(other, lease) == 1
    publish(other, 2)
    assert drain(other) == [2]


def test_a_prepared_receive_that_settled_loses_nothing_when_rolled_back(queue: Sessions) -> None:
    prepared, other = queue.open("prepared", "other")
    publish(other, 1)
    prepared.run("begin")
    lease, _ = receive(prepared)
    ack(prepared, lease)
    prepared.run("prepare transaction 'settled'")
    other.run("rollback prepared 'settled'")
    assert drain(other) == [1]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stale_position_loses_nothing(queue: Sessions, level: str) -> None:
    """What committed after the snapshot of such a transaction lies after a position taken in it."""
    stale, other = queue.open("stale", "other")
    publish(other, 1)
    stale.run(f"begin isolation level {level}")
    take_snapshot(stale)
    publish(other, 2)
    position = stale.value("select pgmb.position()::text")
    stale.run("commit")
    assert other.run(
        "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position())", [position]
    ) == [(2,)]
    assert drain(other) == [1, 2]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stale_snapshot_makes_no_tick(queue: Sessions, level: str) -> None:
    """It would be older than the tick before it, and readers from tick to tick would read events twice."""
    stale, other = queue.open("stale", "other")
    publish(other, 1)
    stale.run(f"begin isolation level {level}")
    take_snapshot(stale)
    publish(other, 2)
    other.run("select pgmb.tick()")
    with raises("MB029"):
        stale.run("select pgmb.tick()")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_position_newer_than_the_snapshot_is_refused(queue: Sessions, level: str) -> None:
    stale, other = queue.open("stale", "other")
    after = other.value("select pgmb.position()::text")
    stale.run(f"begin isolation level {level}")
    take_snapshot(stale)
    publish(other, 1)
    upto = other.value("select pgmb.position()::text")
    read = "select payload from pgmb.between('main', %s::pgmb.position, %s::pgmb.position)"
    with raises("MB022"):
        stale.run(read, [after, upto])
    stale.run("rollback")
    assert stale.run(read, [after, upto]) == [(1,)]


def test_a_position_that_saw_a_commit_the_snapshot_has_in_progress_is_refused(queue: Sessions) -> None:
    """xmax alone does not tell: the transaction lies below it in both snapshots."""
    late, stale, other = queue.open("late", "stale", "other")
    after = other.value("select pgmb.position()::text")
    late.run("begin")
    publish(late, 1)
    publish(other, 2)
    stale.run("begin isolation level repeatable read")
    take_snapshot(stale)
    late.run("commit")
    upto = other.value("select pgmb.position()::text")
    with raises("MB022"):
        stale.run(
            "select payload from pgmb.between('main', %s::pgmb.position, %s::pgmb.position)", [after, upto]
        )


def test_history_dropped_behind_a_snapshots_back_is_reported(queue: Sessions) -> None:
    """TRUNCATE shows to every snapshot: an older one must not take the emptiness for an answer."""
    reader, admin = queue.open("reader", "admin")
    admin.run("select pgmb.drop_queue('q')")
    publish(admin, 1)
    upto = admin.value("select pgmb.position()::text")
    admin.run("select pgmb.alter_stream('main', keep_for => '0 s')")
    admin.run("select pgmb.rotate()")
    admin.run("select pgmb.seal()")
    reader.run("begin isolation level repeatable read")
    take_snapshot(reader)
    assert admin.value("select pgmb.drop_segments()") == 1
    with raises("MB012"):
        reader.run("select payload from pgmb.between('main', pgmb.earliest(), %s::pgmb.position)", [upto])
