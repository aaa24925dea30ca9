"""Limits: at most so many events in flight, at most so many a second, across all consumers of a queue."""

from __future__ import annotations

import time

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import age_rate, publish_aged
from tests.contract.deliveries import Consumer


def create(sessions: Sessions, options: str) -> tuple[Consumer, Consumer]:
    sessions["admin"].run(f"select pgmb.create_queue('q', max_attempts => 3, {options})")
    return Consumer(sessions["one"]), Consumer(sessions["two"])


KINDS = pytest.mark.parametrize("kind", ["", ", ordered => true", ", lanes => '{urgent}'"])


@KINDS
def test_no_more_in_flight_than_allowed(sessions: Sessions, kind: str) -> None:
    one, two = create(sessions, f"max_in_flight => 3{kind}")
    one.publish(None, *range(10))
    held = [one.receive(2)]
    while got := two.receive():
        held.append(got)
    assert sum(len(got.rows) for got in held) == 3
    assert two.names() == []
    one.ack(held[0], held[0].names[0])
    assert len(two.names()) == 1, "a single event settled makes room for one"


@KINDS
def test_a_lease_that_expired_makes_room(sessions: Sessions, kind: str) -> None:
    one, two = create(sessions, f"max_in_flight => 1{kind}")
    one.publish("a", 1)
    held = one.receive()
    assert two.names() == []
    one.expire(held)
    again = two.receive()
    assert again.attempts == {1: 2}
    assert one.names() == []
    two.expire(again)
    assert one.receive().attempts == {1: 3}


def test_a_fair_queue_counts_leases_behind_expired_events(sessions: Sessions) -> None:
    one, _ = create(sessions, "max_in_flight => 3, fair_by => 'key', ttl => '1 hour'")
    publish_aged(one.session.connection, ["1 day", "0"] * 10)
    assert sum(len(one.names(1)) for _ in range(10)) == 3


def test_retries_in_flight_count(sessions: Sessions) -> None:
    one, two = create(sessions, "max_in_flight => 2")
    one.publish(None, 1, 2, 3)
    one.release(one.receive(1))
    assert one.names(1) == [1]
    assert two.names() == [2]
    assert two.names() == []


def test_an_uncommitted_ack_makes_no_room(sessions: Sessions) -> None:
    one, two = create(sessions, "max_in_flight => 1")
    one.publish(None, 1, 2)
    held = one.receive()
    one.session.run("begin")
    one.ack(held)
    assert two.names() == []
    one.session.run("commit")
    assert two.names() == [2]


def test_room_made_in_the_same_call(sessions: Sessions) -> None:
    one, _ = create(sessions, "max_in_flight => 1")
    one.publish(None, 1, 2)
    held = one.receive()
    assert one.receive(ack=held.lease).names == [2]


def test_a_limit_set_later_counts_from_then_on(sessions: Sessions) -> None:
    """Leases given before are not known: for as long as they last, more may be in flight."""
    one, two = create(sessions, "ttl => '1 day'")
    one.session.run("select pgmb.alter_queue('q', ttl => '0')")
    one.publish(None, *range(10))
    assert len(one.names(2)) == 2
    one.session.run("select pgmb.alter_queue('q', max_in_flight => 3)")
    assert len(two.names()) == 3, "on top of the two"
    assert two.names() == []
    one.session.run("select pgmb.alter_queue('q', max_in_flight => 0)")
    assert len(two.names()) == 5


@KINDS
def test_no_more_a_second_than_allowed(sessions: Sessions, kind: str) -> None:
    one, two = create(sessions, f"rps => 40{kind}")
    one.publish(None, *range(200))
    began = time.monotonic()
    got = 0
    while got < 60:
        for consumer in (one, two):
            batch = consumer.receive(7)
            got += len(batch.rows)
            if batch:
                consumer.ack(batch)
    # A quarter of a second's worth may come at once.
    assert time.monotonic() - began >= (60 - 10 - 7) / 40 - 0.05


def test_what_was_not_used_is_lost_but_for_a_moment_s_worth(sessions: Sessions) -> None:
    one, _ = create(sessions, "rps => 20")
    one.publish(None, *range(100))
    one.session.run("select pg_sleep(1)")
    assert len(one.names()) == 5


def test_less_than_one_a_second(sessions: Sessions) -> None:
    one, _ = create(sessions, "rps => 0.5")
    one.publish(None, 1, 2)
    assert one.names() == [1]
    assert one.names() == []
    age_rate(one.session, "2 seconds")
    assert one.names() == [2]


def test_a_clock_set_back_stops_nothing(sessions: Sessions) -> None:
    """As if all times so far had been taken by a clock that was an hour ahead."""
    one, _ = create(sessions, "rps => 10")
    one.publish(None, *range(20))
    assert one.names()
    age_rate(one.session, "-1 hour")
    deadline = time.monotonic() + 20
    while not one.names():
        assert time.monotonic() < deadline, "waits for the clock to catch up"


def test_retries_are_paid_for(sessions: Sessions) -> None:
    one, _ = create(sessions, "rps => 4")
    one.publish(None, 1)
    one.release(one.receive())
    assert one.names() == [], "one came at once, then it has to wait"
    age_rate(one.session, "1 second")
    assert one.names() == [1]


def test_nonsense_is_refused(sessions: Sessions) -> None:
    for options in ("rps => 0", "rps => -1", "max_in_flight => 0", "ttl => '0'", "max_length => 0"):
        with pytest.raises(psycopg.errors.CheckViolation):
            create(sessions, options)
