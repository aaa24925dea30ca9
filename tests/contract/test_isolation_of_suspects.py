"""Suspects: an event whose lease expired twice in a row, or before its last attempt, is leased alone.

Whoever held it may have died of it. Alone, it takes no other event along, and no innocent one dies with it.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.sessions import Sessions
from tests.contract.deliveries import Consumer


@pytest.fixture(params=["", ", ordered => true, shards => 1", ", max_in_flight => 100"])
def kind(request: Any) -> str:
    return str(request.param)


def create(sessions: Sessions, kind: str, max_attempts: int) -> Consumer:
    sessions["admin"].run(f"select pgmb.create_queue('q', max_attempts => {max_attempts}{kind})")
    return Consumer(sessions["one"], patience=0.12 if "ordered" in kind else 0.0)


def test_the_third_time_they_come_one_by_one(sessions: Sessions, kind: str) -> None:
    one = create(sessions, kind, 10)
    one.publish(None, 1, 2, 3)
    for attempt in (1, 2):
        held = one.receive()
        assert held.attempts == {1: attempt, 2: attempt, 3: attempt}
        one.expire(held)
    for name in (1, 2, 3):
        held = one.receive()
        assert held.attempts == {name: 3}
        one.ack(held)


def test_one_that_kills_dies_alone(sessions: Sessions, kind: str) -> None:
    """Event 2 takes down whoever holds it, five attempts in a row: the others are delivered in the end."""
    one = create(sessions, kind, 5)
    one.publish(None, *range(6))
    settled: list[int] = []
    for _ in range(40):
        held = one.receive()
        if not held:
            break
        if 2 in held.names:
            one.expire(held)
        else:
            settled += held.names
            one.ack(held)
    assert sorted(settled) == [0, 1, 3, 4, 5]
    assert one.dead() == [(2, 5)]


def test_before_the_last_attempt_one_expiry_is_enough(sessions: Sessions, kind: str) -> None:
    one = create(sessions, kind, 2)
    one.publish(None, 1, 2)
    one.expire(one.receive())
    for name in (1, 2):
        held = one.receive()
        assert held.attempts == {name: 2}
        one.ack(held)
    assert one.dead() == []


def test_a_failure_told_is_no_expiry(sessions: Sessions, kind: str) -> None:
    """Whoever says that it failed is alive: the count begins anew."""
    one = create(sessions, kind, 10)
    one.publish(None, 1, 2)
    one.expire(one.receive())
    held = one.receive()
    one.retry(held, after="0")
    held = one.receive()
    assert held.attempts == {1: 3, 2: 3}
    one.expire(held)
    assert one.receive().attempts == {1: 4, 2: 4}


def test_those_that_are_no_suspects_still_come_together(sessions: Sessions, kind: str) -> None:
    one = create(sessions, kind, 10)
    one.publish(None, 1)
    for _ in range(2):
        one.expire(one.receive())
    one.publish(None, 2, 3)
    assert one.names() == [1]
    assert one.names() == [2, 3]
