"""A queue with a length that drops the oldest: whoever receives finds at most so many, the newest."""

from __future__ import annotations

import pytest

from harness.sessions import Sessions
from tests.contract.deliveries import Consumer


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run(
        "select pgmb.create_queue('q', '{t}', max_length => 10, when_full => 'drop_oldest')"
    )
    return Consumer(sessions["one"])


def test_the_newest_stay(one: Consumer) -> None:
    one.publish(None, *range(30))
    assert one.take_all(3) == [*range(20, 30)]


def test_a_queue_that_is_not_full_drops_nothing(one: Consumer) -> None:
    one.publish(None, *range(10))
    assert one.take_all(4) == [*range(10)]


def test_only_what_matches_counts(one: Consumer) -> None:
    for number in range(10):
        one.publish(None, number)
        one.publish(None, 100 + number, topic="other")
        one.publish(None, 200 + number, topic="other")
    assert one.take_all() == [*range(10)]


def test_in_the_middle_of_a_batch(one: Consumer) -> None:
    one.publish(None, *range(10))
    held = one.receive(4)
    assert held.names == [0, 1, 2, 3]
    one.publish(None, *range(10, 18))
    one.ack(held)
    assert one.take_all(3) == [*range(8, 18)], "the rest of the old batch and the new one, ten in all"


def test_leases_and_retries_stay(one: Consumer) -> None:
    one.publish(None, 1, 2)
    held = one.receive(1)
    one.retry(held, after="0")
    one.publish(None, *range(10, 40))
    taken = one.take_all()
    assert taken == [1, *range(30, 40)]


def test_a_late_commit_is_dropped_or_delivered_but_the_position_holds(
    one: Consumer, sessions: Sessions
) -> None:
    late = Consumer(sessions["late"])
    late.session.run("begin")
    late.publish(None, 0)
    one.publish(None, *range(1, 30))
    assert one.take_all() == [*range(20, 30)]
    late.session.run("commit")
    one.publish(None, 50)
    assert one.take_all() == [0, 50]


def test_publishers_are_never_refused(one: Consumer) -> None:
    one.publish(None, *range(50))
    assert one.take_all() == [*range(40, 50)]


def test_an_ordered_queue_drops_the_oldest_too(sessions: Sessions) -> None:
    sessions["admin"].run(
        "select pgmb.create_queue('q', ordered => true, max_length => 10, when_full => 'drop_oldest')"
    )
    one = Consumer(sessions["one"])
    for number in range(30):
        one.publish("ab"[number % 2], number)
    taken = one.take_all(3)
    assert [n for n in taken if n % 2] == [*range(21, 30, 2)]
    assert [n for n in taken if not n % 2] == [*range(20, 30, 2)]


def test_the_length_changes_in_place(one: Consumer) -> None:
    one.session.run("select pgmb.alter_queue('q', max_length => 20)")
    one.publish(None, *range(30))
    assert len(one.take_all()) == 20
    one.session.run("select pgmb.alter_queue('q', max_length => 0)")
    one.publish(None, *range(50))
    assert len(one.take_all()) == 50
