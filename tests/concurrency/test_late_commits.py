"""Promises: whatever commits late, early or in another order than it published is read exactly once.

- every reader gets every committed event once, none that was rolled back, each key in commit order;
- a transaction's own events count as unfinished as long as it is;
- a receive that overtakes another's position does not narrow what that one promised to look for;
- the checker that says so reports losses, phantoms, repetitions and disorder when they are there.
"""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from faults.log import late_commits
from faults.log.history import Event, Outcome, Publisher, Reader, judge
from harness.sessions import Sessions
from harness.states import queue_number

RECEIVE = "select lease, payload::text from pgmb.receive('q')"


def payloads(rows: list[Any]) -> list[str]:
    return [row[-1] for row in rows]


@pytest.mark.slow
def test_no_reader_misses_a_late_commit(dsn: str) -> None:
    result = late_commits.run(
        dsn,
        writers=8,
        events=2000,
        delay=0.35,
        size=30,
        rotate_every=0.35,
        seed=random.randrange(1 << 30),
    )
    assert result.verdict.clean, str(result)
    assert result.rotations >= 2, str(result)
    assert result.verdict.rolled_back > 100, str(result)
    # The control: the same run, read by a plain sequence cursor, loses events. So the run is hard enough and
    # the checker sees it.
    assert result.control.of("sequence cursor").missed, str(result)


def test_what_a_transaction_publishes_after_its_receive_is_delivered(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('q')")
    worker, other = sessions.open("worker", "other")
    worker.run("begin")
    worker.run("select pg_current_xact_id()")
    other.run("select pgmb.publish('t', '1')")  # a later transaction, finished earlier
    ((lease, payload),) = worker.run(RECEIVE)
    assert payload == "1"
    worker.run("select pgmb.publish('t', '2')")
    worker.run("select pgmb.ack(%s)", [lease])
    worker.run("commit")
    assert payloads(other.run(RECEIVE)) == ["2"]


@pytest.mark.parametrize("ticked", [False, True])
def test_what_a_transaction_publishes_lies_after_the_position_it_takes(
    sessions: Sessions, db: psycopg.Connection[Any], ticked: bool
) -> None:
    writer, other = sessions.open("writer", "other")
    writer.run("begin")
    writer.run("select pgmb.publish('t', '1')")
    other.run("select pgmb.publish('t', '2')")  # a later transaction, finished earlier
    if ticked:
        tick = writer.value("select pgmb.tick()")
        position = writer.value("select pgmb.position_of('main', %s)::text", [tick])
    else:
        position = writer.value("select pgmb.position()::text")
    writer.run("select pgmb.publish('t', '3')")
    writer.run("commit")
    between = "select payload::text from pgmb.between('main', {}, {})"
    before = db.execute(between.format("pgmb.earliest()", "%s"), [position]).fetchall()
    after = db.execute(between.format("%s", "pgmb.position()"), [position]).fetchall()
    assert (payloads(before), payloads(after)) == (["2"], ["1", "3"])


def test_a_receive_that_acks_first_keeps_the_bounds_of_one_that_passed_it(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    """Its ack takes an xid before it waits for the queue; another then moves the position by younger ones."""
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('t', '1')")
    slow, fast, late = sessions.open("slow", "fast", "late")
    ((lease, _),) = slow.run(RECEIVE)
    fast.run("begin")
    fast.run("select pgmb_internal.lock_queue(%s)", [queue_number(db)])
    waiting = slow.start("select lease, payload::text from pgmb.receive('q', ack => %s)", [lease]).blocked()
    late.run("begin")
    late.run("select pgmb.publish('t', 'null')")
    db.execute("select pgmb.publish('t', '2')")
    assert payloads(fast.run(RECEIVE)) == ["2"]
    db.execute("select pgmb.publish('t', '3')")
    fast.run("commit")
    assert payloads(waiting.result()) == ["3"]
    late.run("commit")
    assert payloads(fast.run(RECEIVE)) == ["null"]


def test_writers_that_serialise_on_a_row_are_read_in_that_order(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    """The second holds the older xid: ordered by xid its event would come first."""
    db.execute("select pgmb.create_queue('q')")
    db.execute("create table account (balance int)")
    db.execute("insert into account values (0)")
    first, second = sessions.open("first", "second")
    second.run("begin")
    second.run("select pg_current_xact_id()")
    first.run("begin")
    first.run("update account set balance = 1")
    waiting = second.start("update account set balance = 2").blocked()
    first.run("select pgmb.publish('t', '1', key => 'account')")
    first.run("commit")
    waiting.result()
    second.run("select pgmb.publish('t', '2', key => 'account')")
    second.run("commit")
    assert payloads(db.execute(RECEIVE).fetchall()) == ["1", "2"]


class TestChecker:
    """A checker that cannot fail proves nothing."""

    @staticmethod
    def history() -> tuple[Publisher, Reader]:
        publisher, reader = Publisher(), Reader("r")
        for first, outcome in ((1, Outcome.COMMITTED), (4, Outcome.ROLLED_BACK), (7, Outcome.UNKNOWN)):
            transaction = publisher.begin()
            transaction.events = [Event(name, "k", name, "t") for name in range(first, first + 3)]
            transaction.outcome = outcome
        reader.got([1, 2, 3], turn=1)
        return publisher, reader

    def test_clean(self) -> None:
        publisher, reader = self.history()
        assert judge([publisher], [reader]).clean
        reader.got([7, 8, 9], turn=2)  # unknown to the publisher: either is right
        verdict = judge([publisher], [reader])
        assert verdict.clean
        assert (verdict.committed, verdict.rolled_back, verdict.unknown) == (3, 3, 3)

    def test_loss(self) -> None:
        publisher, reader = self.history()
        del reader.deliveries[1]
        assert judge([publisher], [reader]).of("r").missed == [2]
        reader.put_aside.add(2)
        assert judge([publisher], [reader]).clean

    @pytest.mark.parametrize("name", [4, 99])
    def test_phantom(self, name: int) -> None:
        publisher, reader = self.history()
        reader.got([name], turn=2)
        assert judge([publisher], [reader]).of("r").phantom == [name]

    def test_unwanted(self) -> None:
        publisher, reader = self.history()
        reader.wants = lambda event: event.name != 3
        assert judge([publisher], [reader]).of("r").phantom == [3]

    def test_repetition(self) -> None:
        publisher, reader = self.history()
        reader.got([2], turn=2)
        assert judge([publisher], [reader]).of("r").repeated == [2]

    def test_repetition_with_a_reason(self) -> None:
        publisher, reader = self.history()
        reader.once = False
        first = reader.deliveries[1]
        (again,) = reader.got([2], turn=2, attempt=2)
        again.settled = True
        verdict = judge([publisher], [reader])
        assert verdict.clean
        assert verdict.of("r").explained == 1
        first.settled = True  # settled, and yet delivered again
        assert judge([publisher], [reader]).of("r").repeated == [2]

    def test_disorder(self) -> None:
        publisher, reader = self.history()
        reader.deliveries[0].turn = 2
        assert judge([publisher], [reader]).of("r").disordered == [1]
