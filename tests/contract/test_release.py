"""Release: events go back untried, at once, and the attempt does not count."""

from __future__ import annotations

import pytest

from harness.sessions import Sessions
from tests.contract.deliveries import Consumer, lost


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run("select pgmb.create_queue('q', max_attempts => 3, backoff_base => '1 hour')")
    return Consumer(sessions["one"])


def test_all_of_a_lease(one: Consumer) -> None:
    one.publish(None, 1, 2)
    held = one.receive()
    assert one.release(held) == 2
    again = one.receive()
    assert again.attempts == {1: 1, 2: 1}
    with lost():
        one.session.run("select pgmb.extend(%s)", [held.lease])


def test_some_of_a_lease(one: Consumer) -> None:
    one.publish(None, 1, 2, 3)
    held = one.receive()
    assert one.release(held, 2) == 1
    assert one.receive().attempts == {2: 1}
    assert one.ack(held) == 2


def test_of_a_retried_lease_the_attempt_stays(one: Consumer) -> None:
    one.publish(None, 1, 2)
    one.retry(one.receive(), after="0", error="no")
    held = one.receive()
    assert held.attempts == {1: 2, 2: 2}
    assert one.release(held, 1) == 1
    again = one.receive()
    assert again.attempts == {1: 2}
    assert one.release(held) == 1
    assert one.receive().attempts == {2: 2}


def test_as_often_as_one_likes(one: Consumer) -> None:
    one.publish(None, 1)
    for _ in range(10):
        held = one.receive()
        assert held.attempts == {1: 1}
        one.release(held)
    assert one.dead() == []


def test_a_lost_lease_is_refused(one: Consumer, sessions: Sessions) -> None:
    two = Consumer(sessions["two"])
    one.publish(None, 1)
    held = one.receive()
    one.expire(held)
    again = two.receive()
    with lost():
        one.release(held)
    assert two.ack(again) == 1


def test_with_the_transaction_or_not_at_all(one: Consumer, sessions: Sessions) -> None:
    two = Consumer(sessions["two"])
    one.publish(None, 1)
    held = one.receive()
    one.session.run("begin")
    one.release(held)
    assert two.names() == []
    one.session.run("rollback")
    assert two.names() == []
    assert one.ack(held) == 1


def test_what_was_settled_stays_settled(one: Consumer) -> None:
    one.publish(None, 1, 2)
    held = one.receive()
    one.ack(held, 1)
    assert one.release(held) == 1
    assert one.names() == [2]
    assert one.release(held) == 0
