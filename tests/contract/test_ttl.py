"""Time to live: an event older than the queue allows when it is first received becomes a dead letter."""

from __future__ import annotations

from typing import Any

import pytest

from harness.sessions import Sessions
from harness.states import age_waiting_events
from tests.contract.deliveries import Consumer, lost


@pytest.fixture(params=["", ", ordered => true, shards => 1", ", lanes => '{urgent}'"])
def one(request: Any, sessions: Sessions) -> Consumer:
    sessions["admin"].run(f"select pgmb.create_queue('q', ttl => '1 hour', max_attempts => 2{request.param})")
    return Consumer(sessions["one"], patience=0.12 if "ordered" in request.param else 0.0)


def publish_old(consumer: Consumer, *names: int, key: str | None = None) -> None:
    for name in names:
        consumer.session.run(
            "insert into pgmb.log_main (topic, payload, key, published_at)"
            " values ('t', to_json(%s::int), %s, now() - interval '2 hours')",
            [name, key],
        )


def test_the_old_are_dead_and_the_young_come(one: Consumer) -> None:
    publish_old(one, 1, 2)
    one.publish(None, 3)
    publish_old(one, 4)
    one.publish(None, 5)
    assert one.take_all(2) == [3, 5]
    assert one.dead() == [(1, 0), (2, 0), (4, 0)]
    error = one.session.value("select error from pgmb.dead_letters('q') limit 1")
    assert error.startswith("expired: older than")


def test_the_old_alone_are_passed_over(one: Consumer) -> None:
    publish_old(one, *range(20))
    assert one.take_all(3) == []
    assert len(one.dead()) == 20
    assert one.take_all() == []
    assert len(one.dead()) == 20


def test_a_lease_settles_what_it_delivered(one: Consumer) -> None:
    publish_old(one, 1)
    one.publish("a", 2, 3)
    publish_old(one, 4)
    one.publish("a", 5)
    held = one.receive()
    assert held.names == [2, 3, 5]
    one.bury(held, 3)
    assert one.ack(held) == 2
    assert one.take_all() == []
    assert one.dead() == [(1, 0), (4, 0), (3, 1)]


def test_an_expired_lease_does_not_bring_the_dead_back(one: Consumer) -> None:
    publish_old(one, 1)
    one.publish("a", 2)
    held = one.receive()
    one.expire(held)
    assert one.receive().attempts == {2: 2}
    assert one.dead() == [(1, 0)]


def test_retries_are_not_too_old(one: Consumer) -> None:
    """It was received in time; what it takes from there is the retry policy's affair."""
    one.publish(None, 1)
    one.release(one.receive())
    age_waiting_events(one.session, "3 hours")
    assert one.names() == [1]


def test_a_dead_letter_sent_back_is_delivered(one: Consumer) -> None:
    publish_old(one, 1)
    one.names()
    one.session.run("select pgmb.redrive('q')")
    assert one.take_all() == [1]


def test_a_superseded_receive_leaves_no_dead_letters(one: Consumer, sessions: Sessions) -> None:
    two = Consumer(sessions["two"])
    publish_old(one, 1)
    one.session.run("begin")
    assert one.names() == []
    two.session.run("select pg_sleep(0.1)")
    two.names()
    with lost():
        one.session.run("commit")
    assert two.dead() == [(1, 0)]
