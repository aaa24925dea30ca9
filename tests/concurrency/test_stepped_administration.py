"""Administrative calls beside consumers: seek, purge, convert_queue, redrive.

Promises: a call that answers success took effect, however long its transaction stays open. Consumers get
MB013 meanwhile, and consumers of other queues go on. No event is lost, and none that was settled comes again.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import generation_is_marked, lane_settings, queue_number, retries_waiting
from harness.waiting import until_true

FORMS = {
    "plain": "",
    "ordered": ", ordered => true",
    "lanes": ", lanes => '{urgent,soon}'",
    "fair": ", fair_by => 'key'",
}
TOPICS = ("urgent", "soon", "other")


def raises(sqlstate: str) -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == sqlstate)


def make_queue(sessions: Sessions, form: str, events: int, limit: str = "") -> Session:
    admin = sessions["admin"]
    admin.run(f"select pgmb.create_queue('q', backoff_jitter => 0{FORMS[form]}{limit})")
    for number in range(events):
        admin.run(
            "select pgmb.publish(%s, to_json(%s::int), key => %s)", [TOPICS[number % 3], number, f"k{number}"]
        )
    return admin


def receive(session: Session, size: int = 100) -> tuple[Any, list[int]]:
    rows = session.run("select lease, payload from pgmb.receive('q', %s)", [size])
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def take_all(session: Session, count: int) -> list[int]:
    """Receives and acks until `count` events came, and once more."""
    taken: list[int] = []

    def take() -> bool:
        lease, got = receive(session)
        if lease is not None:
            session.run("select pgmb.ack(%s)", [lease])
        taken.extend(got)
        return len(taken) >= count

    until_true(take)
    take()
    return sorted(taken)


@pytest.mark.parametrize("form", ["plain", "ordered", "fair"])
def test_an_open_seek_is_not_superseded_and_loses_no_event(sessions: Sessions, form: str) -> None:
    admin = make_queue(sessions, form, 9)
    one, other = sessions.open("one", "other")
    lease, leased = receive(one, 3)
    retried, _ = receive(one, 3)
    one.run("select pgmb.retry(%s, after => '1 hour')", [retried])
    other.run("select pgmb.create_queue('another', starting => pgmb.earliest())")
    admin.run("begin")
    admin.run("select pgmb.seek('q', pgmb.earliest())")
    with raises("MB013"):
        receive(other)
    assert len(other.run("select from pgmb.receive('another')")) == 9, "other queues go on"
    admin.run("commit")
    with raises("MB011"):
        one.run("select pgmb.ack(%s)", [lease])
    assert leased
    assert take_all(one, 9) == list(range(9))


def test_an_open_purge_is_not_superseded(sessions: Sessions) -> None:
    admin = make_queue(sessions, "lanes", 6)
    admin.run("begin")
    admin.run("select pgmb.purge('q')")
    with raises("MB013"):
        receive(sessions["one"])
    admin.run("commit")
    assert receive(sessions["one"])[1] == []


def test_a_purge_does_not_wait_for_consumers_that_ack_and_wait_for_the_queue(sessions: Sessions) -> None:
    admin = make_queue(sessions, "plain", 3)
    first, consumer = sessions.open("first", "consumer")
    lease, (_got,) = receive(consumer, 1)
    first.run("begin")
    first.run("select from pgmb.receive('q', 1)")
    purge = admin.start("select pgmb.purge('q')").blocked()
    # It has acked its lease, and waits behind the purge.
    again = consumer.start("select payload from pgmb.receive('q', 1, ack => %s)", [lease]).blocked()
    first.run("commit")
    purge.result()
    assert again.result() == []
    assert take_all(admin, 0) == []


@pytest.mark.parametrize("retried", [False, True], ids=["fresh", "retried"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_lease_that_is_settled_while_the_queue_is_moved_is_over(
    sessions: Sessions, outcome: str, retried: bool
) -> None:
    admin = make_queue(sessions, "plain", 1)
    holder, other = sessions.open("holder", "other")
    lease, _ = receive(holder)
    if retried:
        holder.run("select pgmb.retry(%s, after => '0')", [lease])
        lease, _ = receive(holder)
    holder.run("begin")
    holder.run("select pgmb.ack(%s)", [lease])
    admin.run("select pgmb.purge('q')")
    holder.run(outcome)
    assert receive(other) == (None, [])
    with raises("MB011"):
        holder.run("select pgmb.extend(%s)", [lease])
    assert receive(other) == (None, [])
    assert retries_waiting(admin) == 0


def test_a_purge_that_waited_does_not_move_the_queue_back(sessions: Sessions) -> None:
    admin = make_queue(sessions, "plain", 1)
    one = sessions["one"]
    one.run("begin")
    lease, got = receive(one)
    assert got == [0]
    purge = admin.start("select pgmb.purge('q')").blocked()
    sessions["other"].run("select pgmb.publish('other', '1')")
    one.run("select pgmb.ack(%s)", [lease])
    one.run("commit")
    purge.result()
    assert receive(one)[1] == []


@pytest.mark.parametrize(("before", "after"), [("plain", "ordered"), ("lanes", "plain")])
def test_an_open_conversion_is_not_superseded(sessions: Sessions, before: str, after: str) -> None:
    admin = make_queue(sessions, before, 9)
    one = sessions["one"]
    settled, done = receive(one, 2)
    one.run("select pgmb.ack(%s)", [settled])
    admin.run("begin")
    admin.run(f"select pgmb.convert_queue('q'{FORMS[after]})")
    with raises("MB013"):
        receive(one)
    admin.run("commit")
    assert take_all(one, 9 - len(done)) == sorted({*range(9)} - {*done})


@pytest.mark.parametrize(
    ("before", "limit", "in_order"),
    [
        ("lanes", "", None),
        ("lanes", ", max_in_flight => 100", None),
        ("ordered", "", True),
        ("ordered", ", max_in_flight => 100", False),
    ],
)
def test_a_receive_that_waits_while_a_conversion_removes_lanes_finds_the_new_form(
    sessions: Sessions, before: str, limit: str, in_order: bool | None
) -> None:
    """`in_order`: whether the receive asks the shards in order, or those first that are free."""
    admin = make_queue(sessions, before, 9, limit)
    one = sessions["one"]
    if in_order is not None:
        seeds = (number / 100 for number in range(100))
        seed = next(
            s for s in seeds if one.value("select random() < 0.125 from setseed(%s)", [s]) is in_order
        )
        one.run("select setseed(%s)", [seed])
    admin.run("begin")
    admin.run("select pgmb.convert_queue('q')")
    waiting = one.start("select payload from pgmb.receive('q')").blocked()
    admin.run("commit")
    assert sorted([payload for (payload,) in waiting.result()] + receive(one)[1]) == list(range(9))


@pytest.mark.parametrize(
    ("call", "settled"),
    [
        ("convert_queue('q')", True),
        pytest.param("convert_queue('q')", False, marks=pytest.mark.minutes),
        pytest.param("seek('q', pgmb.earliest())", True, marks=pytest.mark.minutes),
        ("seek('q', pgmb.earliest())", False),
    ],
)
def test_a_call_supersedes_a_long_receive_of_a_lane(sessions: Sessions, call: str, settled: bool) -> None:
    """The conversion removes the lane; its consumer is refused all the same."""
    admin = make_queue(sessions, "lanes", 0)
    admin.run("select pgmb.publish('other', '1')")
    long = sessions["long"]
    long.run("begin")
    lease, got = receive(long)
    assert got == [1]
    if settled:
        long.run("select pgmb.ack(%s)", [lease])
    admin.run(f"select pgmb.{call}")
    if settled:
        with raises("MB011"):
            long.run("commit")
    else:
        long.run("commit")
        with raises("MB011"):
            long.run("select pgmb.ack(%s)", [lease])
    assert take_all(sessions["one"], 1) == [1]


@pytest.mark.parametrize("first", ["mark", "lock"])
def test_a_seek_beside_a_consumer_that_supersedes_another_takes_effect(
    sessions: Sessions, first: str
) -> None:
    """The consumer marks a generation before the seek has its lock, or after."""
    admin = make_queue(sessions, "plain", 4)
    long, opener, committing = sessions.open("long", "opener", "committing")
    taken, _ = receive(opener, 2)
    opener.run("select pgmb.ack(%s)", [taken])
    long.run("begin")
    receive(long, 1)
    number = queue_number(admin)
    if first == "lock":
        admin.run("begin")
        admin.run("select pgmb_internal.administer(%s)", [number])
        with raises("MB013"):
            receive(opener, 1)
        admin.run("select pgmb.seek('q', pgmb.earliest())")
        admin.run("commit")
    else:
        committing.run("begin")
        committing.run("select pgmb_internal.hold_generation(%s)", [number])
        opened = opener.start("select payload from pgmb.receive('q', 1)").blocked()
        until_true(lambda: generation_is_marked(committing))
        seek = admin.start("select pgmb.seek('q', pgmb.earliest())").blocked()
        committing.run("rollback")
        assert opened.result() == [(2,)]
        seek.result()
    long.run("rollback")
    assert take_all(opener, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("before", "after"), [("ordered", "plain"), ("plain", "ordered"), ("lanes", "plain"), ("ordered", "fair")]
)
@pytest.mark.parametrize("first", ["redrive", "convert"])
def test_a_redrive_beside_a_conversion_loses_no_event(
    sessions: Sessions, before: str, after: str, first: str
) -> None:
    admin = make_queue(sessions, before, 9)
    one = sessions["one"]
    buried = 0

    def bury() -> bool:
        nonlocal buried
        lease, _ = receive(one)
        if lease is not None:
            buried += one.value("select pgmb.bury(%s, error => 'x')", [lease])
        return buried == 9

    until_true(bury)
    redrive, convert = "select pgmb.redrive('q')", f"select pgmb.convert_queue('q'{FORMS[after]})"
    admin.run("begin")
    admin.run(redrive if first == "redrive" else convert)
    waiting = one.start(convert if first == "redrive" else redrive).blocked()
    admin.run("commit")
    waiting.result()
    admin.run("select pgmb.maintain()")
    assert take_all(one, 9) == list(range(9))


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("alter_queue('q', max_attempts => 3)", "max_attempts"),
        ("bind('q', '{soon}')", "topic"),
    ],
)
def test_a_change_that_waited_for_a_conversion_changes_all_lanes(
    sessions: Sessions, change: str, changed: str
) -> None:
    admin = make_queue(sessions, "plain", 0)
    admin.run("begin")
    admin.run(f"select pgmb.convert_queue('q'{FORMS['lanes']})")
    waiting = sessions["one"].start(f"select pgmb.{change}").blocked()
    admin.run("commit")
    waiting.result()
    assert len(lane_settings(admin, changed)) == 1


def test_an_administrative_call_waits_for_another_within_bounds(sessions: Sessions) -> None:
    admin = make_queue(sessions, "plain", 1)
    admin.run("begin")
    admin.run("select pgmb.seek('q', pgmb.earliest())")
    with raises("MB013"):
        sessions["one"].run("select pgmb.convert_queue('q', true)")
    admin.run("commit")
    assert take_all(sessions["one"], 1) == [0]
