"""A transaction that publishes and receives: its events are delivered after they are committed.

Promises: a receive gives what others committed, never what its own transaction published or brought into the
log of delayed events; after a commit these come once, to whoever receives next; after a rollback nobody ever
sees them.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from harness.sessions import Session, Sessions


@pytest.fixture
def two(sessions: Sessions) -> tuple[Session, Session]:
    """`own` publishes and receives in one transaction, `other` does what others do meanwhile."""
    own, other = sessions.open("own", "other")
    own.run("select pgmb.create_queue('q', backoff_jitter => 0)")
    return own, other


def publish(session: Session, number: int) -> None:
    session.run("select pgmb.publish('t', to_json(%s::int))", [number])


def receive(session: Session, size: int = 100) -> tuple[UUID | None, list[Any]]:
    rows = session.run("select lease, payload from pgmb.receive('q', %s)", [size])
    assert len({lease for lease, _ in rows}) <= 1
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def ack(session: Session, lease: UUID | None) -> int:
    return int(session.value("select pgmb.ack(%s)", [lease]))


def drain(session: Session, size: int = 100) -> list[Any]:
    payloads: list[Any] = []
    while True:
        lease, more = receive(session, size)
        if lease is None:
            return payloads
        payloads += more
        assert ack(session, lease) == len(more)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_own_events_are_delivered_after_the_commit(two: tuple[Session, Session], end: str) -> None:
    own, other = two
    own.run("begin")
    publish(own, 1)
    publish(own, 2)
    assert receive(own) == (None, [])
    own.run(end)
    assert drain(other) == ([1, 2] if end == "commit" else [])
    publish(other, 3)
    assert drain(other) == [3]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_is_published_around_a_receive_is_delivered_once(two: tuple[Session, Session], end: str) -> None:
    own, other = two
    publish(other, 1)
    own.run("begin")
    publish(own, 2)
    publish(other, 3)
    assert drain(own) == [1, 3]
    publish(other, 4)
    publish(own, 5)
    assert drain(own) == [4]
    publish(own, 6)
    publish(other, 7)
    own.run(end)
    assert drain(other) == ([2, 5, 6, 7] if end == "commit" else [1, 3, 4, 7])
    assert drain(own) == []


def test_what_is_published_after_the_receive_is_not_lost_to_a_later_xid(two: tuple[Session, Session]) -> None:
    """A transaction with a higher xid ends before the receive, so that the snapshot's list passes ours."""
    own, other = two
    own.run("begin")
    publish(own, 1)
    publish(other, 2)
    assert drain(own) == [2]
    publish(own, 3)
    own.run("commit")
    assert drain(other) == [1, 3]


@pytest.mark.parametrize(
    "settings", ["", ", ordered => true", ", max_in_flight => 100", ", fair_by => 'key'"]
)
def test_every_kind_of_queue_delivers_after_the_commit(two: tuple[Session, Session], settings: str) -> None:
    own, other = two
    own.run(f"select pgmb.create_queue('second'{settings})")
    own.run("begin")
    publish(own, 1)
    assert own.run("select payload from pgmb.receive('second')") == []
    assert own.run("select payload from pgmb.receive('second')") == []
    own.run("commit")
    assert other.run("select payload from pgmb.receive('second')") == [(1,)]


def test_a_savepoint_takes_events_and_receives_back(two: tuple[Session, Session]) -> None:
    own, other = two
    publish(other, 1)
    own.run("begin")
    publish(own, 2)
    own.run("savepoint a")
    publish(own, 3)
    lease, got = receive(own)
    assert got == [1]
    ack(own, lease)
    own.run("rollback to a")
    publish(own, 4)
    assert drain(own) == [1]
    own.run("commit")
    assert drain(other) == [2, 4]


def test_a_delayed_event_that_a_receive_brings_into_the_log_comes_with_the_next(
    two: tuple[Session, Session],
) -> None:
    own, other = two
    other.run("select pgmb.publish('t', to_json(1), delay => '1 ms')")
    own.run("begin")
    own.run("select pg_sleep(0.06)")
    assert receive(own) == (None, [])
    own.run("commit")
    assert drain(other) == [1]


def test_own_transactions_one_after_another_lose_nothing(two: tuple[Session, Session]) -> None:
    own, other = two
    for number in range(0, 40, 4):
        own.run("begin")
        publish(own, number)
        assert drain(own) == ([] if number == 0 else [number - 2, number - 1])
        publish(own, number + 1)
        own.run("commit")
        other.run("begin")
        publish(other, number + 2)
        assert drain(other) == [number, number + 1]
        publish(other, number + 3)
        other.run("commit")
    assert drain(own) == [38, 39]


class Model:
    """What each session has published and received, and what became of it."""

    def __init__(self) -> None:
        self.committed: set[int] = set()
        self.settled: list[int] = []
        self.counter = 0


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_deliver_every_commit_once_and_no_rollback(sessions: Sessions, seed: int) -> None:
    """Five writers with savepoints, rollbacks and prepared ends; whoever is alone in receiving acks at
    once."""
    draw = random.Random(seed)
    names = [f"s{number}" for number in range(5)]
    sessions[names[0]].run("select pgmb.create_queue('q')")
    model = Model()
    opened: dict[str, list[list[int]]] = {}  # per session in a transaction: published, per savepoint level
    received: dict[str, list[int]] = {}
    receiver: str | None = None  # the session whose open transaction has received
    prepared: list[tuple[str, list[int]]] = []

    def end(name: str, commit: bool) -> None:
        nonlocal receiver
        published = [number for level in opened.pop(name) for number in level]
        if commit and name != receiver and draw.random() < 0.2:
            gid = f"own-{seed}-{model.counter}-{len(prepared)}"
            sessions[name].run(f"prepare transaction '{gid}'")
            prepared.append((gid, published))
        else:
            sessions[name].run("commit" if commit else "rollback")
            if commit:
                model.committed.update(published)
        if name == receiver:
            receiver = None
            if commit:
                model.settled += received.pop(name)
            received.pop(name, None)

    try:
        for _ in range(120):
            name = draw.choice(names)
            session = sessions[name]
            action = draw.random()
            if action < 0.15 and name not in opened:
                session.run("begin")
                if draw.random() < 0.5:
                    session.run("select pg_current_xact_id()")
                opened[name] = [[]]
            elif action < 0.5:
                numbers = range(model.counter + 1, model.counter + 1 + draw.choice((1, 1, 2, 70)))
                model.counter = numbers[-1]
                payloads = "array(select to_json(n) from generate_series(%s::int, %s::int) n)"
                session.run(f"select pgmb.publish_many('t', {payloads})", [numbers[0], numbers[-1]])
                if name in opened:
                    opened[name][-1].extend(numbers)
                else:
                    model.committed.update(numbers)
            elif action < 0.75:
                if receiver not in (None, name):
                    continue
                rows = session.run(
                    "select lease, payload from pgmb.receive('q', %s)", [draw.choice((1, 3, 100))]
                )
                if rows:
                    assert session.value("select pgmb.ack(%s)", [rows[0][0]]) == len(rows)
                    got = [payload for _, payload in rows]
                    if name in opened:
                        receiver = name
                        received.setdefault(name, []).extend(got)
                    else:
                        model.settled += got
                elif name in opened:
                    receiver = name
                    received.setdefault(name, [])
            elif action < 0.82 and name in opened and name != receiver:
                session.run(f"savepoint s{len(opened[name])}")
                opened[name].append([])
            elif action < 0.88 and name in opened and len(opened[name]) > 1 and name != receiver:
                session.run(f"rollback to s{len(opened[name]) - 1}")
                opened[name][-1] = []
            elif action < 0.92 and draw.random() < 0.3:
                sessions["janitor"].run("select pgmb.rotate()")
                sessions["janitor"].run("select pgmb.seal()")
            elif action < 0.95 and prepared:
                gid, published = prepared.pop(draw.randrange(len(prepared)))
                commit = draw.random() < 0.7
                sessions["janitor"].run(f"{'commit' if commit else 'rollback'} prepared '{gid}'")
                if commit:
                    model.committed.update(published)
            elif name in opened:
                end(name, draw.random() < 0.7)
        for name in list(opened):
            end(name, True)
        while prepared:
            gid, published = prepared.pop()
            sessions["janitor"].run(f"commit prepared '{gid}'")
            model.committed.update(published)
        model.settled += drain(sessions[names[0]])
    finally:
        for gid, _ in prepared:
            sessions["janitor"].run(f"rollback prepared '{gid}'")
    assert sorted(model.settled) == sorted(model.committed)
