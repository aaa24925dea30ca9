"""Release: events go back untried, at once, and the attempt does not count."""

from __future__ import annotations

import pytest

from harness.sessions import Sessions
from harness.states import date_releases, make_due, retries
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


def test_a_release_may_wait(one: Consumer) -> None:
    one.publish(None, 1, 2)
    one.release(one.receive(), 1, after="1 hour")
    assert one.names() == []
    make_due(one.session)
    again = one.receive()
    assert again.attempts == {1: 1}
    one.release(again, after="1 hour")
    assert waits(one) == {1: 3600}


def test_what_nobody_can_handle_waits_longer_each_time_and_at_last_is_buried(one: Consumer) -> None:
    """The first release is put back in time instead of waiting for it."""
    one.publish(None, 1)
    one.release(one.receive(), after="1 second", error="nobody", bury_after="1 day")
    assert waits(one) == {1: 1}
    for since, then in ("10 seconds", 10), ("40 seconds", 40), ("1 hour", 60):
        make_due(one.session)
        date_releases(one.session, since)
        again = one.receive()
        assert again.attempts == {1: 1}
        one.release(again, after="1 second", error="nobody", bury_after="1 day")
        assert waits(one) == {1: then}
    make_due(one.session)
    date_releases(one.session, "1 day")
    assert one.release(one.receive(), after="1 second", error="nobody", bury_after="1 day") == 1
    assert one.dead() == [(1, 1)]
    ((error, errors),) = one.session.run("select error, errors from pgmb.dead_letters('q')")
    assert error == "nobody"
    assert [given["error"] for given in errors] == ["nobody"]
    one.session.run("select pgmb.redrive('q')")
    one.release(one.receive(), after="1 second", bury_after="1 day")
    assert waits(one) == {1: 1}


def test_an_attempt_begins_the_time_of_releases_again(one: Consumer) -> None:
    one.publish(None, 1)
    one.release(one.receive(), bury_after="1 day")
    date_releases(one.session, "1 day")
    one.retry(one.receive(), after="0")
    again = one.receive()
    assert again.attempts == {1: 2}
    one.release(again, after="1 second", bury_after="1 day")
    assert waits(one) == {1: 1}
    assert one.dead() == []


def test_a_release_that_may_wait_no_time_buries(one: Consumer) -> None:
    one.publish(None, 1)
    assert one.release(one.receive(), error="nobody", bury_after="0") == 1
    assert one.dead() == [(1, 1)]


def waits(one: Consumer) -> dict[int, int]:
    """How many seconds each event waits, rounded."""
    return {event.payload: round(event.due_in or 0) for event in retries(one.session)}
