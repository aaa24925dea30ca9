"""The cost of a receive does not grow with the leases in flight, the retries or the dead rows of a queue.

Cost is pages and WAL, not time: the same on every machine and under any load.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import psycopg
import pytest

from harness.explain import cost, entries_read
from harness.states import age_leases, drain, fail, fill, hold_leases, pin_xmin, publish, receive
from tests.conftest import Connect

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

Connection = psycopg.Connection[Any]

RECEIVE = "select * from pgmb.receive('q', 1)"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("", id="plain"),
        pytest.param(", fair_by => 'key'", id="fair"),
        pytest.param(", max_in_flight => 100000", id="limited"),
        pytest.param(", ttl => '1 day'", id="ttl"),
        pytest.param(", ordered => true, shards => 1", id="ordered"),
    ],
)
def test_a_receive_costs_the_same_beside_many_leases(db: Connection, options: str) -> None:
    db.execute(f"select pgmb.create_queue('q'{options})")
    publish(db, 70, keys=[f"key {n}" for n in range(70)])
    hold_leases(db, 5)
    # An ordered queue leases nothing while its youngest lease is younger than 100 ms.
    age_leases(db)
    before = cost(db, RECEIVE)
    hold_leases(db, 60)
    age_leases(db)
    after = cost(db, RECEIVE)
    assert after.pages <= before.pages + 25, f"{before} before, {after} after"
    assert after.wal_bytes <= before.wal_bytes + 100, f"{before} before, {after} after"


def test_leases_made_shorter_cost_later_receives_nothing(db: Connection) -> None:
    """They end in an hour. No sweep needs to look at them until then."""
    db.execute("select pgmb.create_queue('q', lease_for => '1 day')")
    publish(db, 70)
    before = cost(db, RECEIVE)
    for lease in hold_leases(db, 60, lease_for="1 day"):
        db.execute("select pgmb.extend(%s, '1 hour')", [lease])
    after = cost(db, RECEIVE)
    assert after.pages <= before.pages + 25, f"{before} before, {after} after"
    assert after.wal_bytes <= before.wal_bytes + 1000, f"{before} before, {after} after"


def test_ordered_retries_cost_the_same_beside_a_pinned_xmin(db: Connection, connect: Connect) -> None:
    """Dead rows of retries are not read again. Counts entries of indexes: pages grow with their height."""
    db.execute("select pgmb.create_queue('q', ordered => true, shards => 1, backoff_base => '0')")
    pinned = pin_xmin(connect)

    def retried() -> int:
        """Fails events of ten keys behind which others wait, and receives them again: the entries read."""
        publish(db, 10, keys=[f"key {n}" for n in range(10)])
        held = hold_leases(db, 1, size=10)
        publish(db, 10, keys=[f"key {n}" for n in range(10)])
        age_leases(db)
        assert receive(db) is None, "the keys are held"
        fail(db, *held)
        with db.transaction():
            read = entries_read(db, "pgmb.retry")
            lease = receive(db, size=10)
            read = entries_read(db, "pgmb.retry") - read
        db.execute("select pgmb.ack(%s)", [lease])
        drain(db)
        return read

    # From time to time a scan for due rows starts some seconds earlier: the median passes over that.
    rounds = [retried() for _ in range(45)]
    pinned.rollback()
    assert median(rounds[-15:]) <= median(rounds[:15]) + 40, rounds


def test_a_receive_sets_a_bounded_number_of_events_aside(db: Connection) -> None:
    """Events behind a held key are copied under the queue's lock: later receives copy the rest."""
    db.execute("select pgmb.create_queue('q', ordered => true, shards => 1, lease_for => '1 hour')")
    publish(db, 1, keys=["held"])
    held = hold_leases(db, 1)
    age_leases(db)
    publish(db, 1500, keys=["held"] * 1500)
    before = cost(db, RECEIVE)
    publish(db, 4500, keys=["held"] * 4500)
    after = cost(db, RECEIVE)
    assert after.wal_bytes <= before.wal_bytes * 1.2, f"{before} before, {after} after"
    publish(db, 1, keys=["free"])
    receives = 1
    while (lease := receive(db)) is None:
        receives += 1
    assert receives <= 8, "to the event that may go"
    for one in [*held, lease]:
        db.execute("select pgmb.ack(%s)", [one])
    got: list[int] = []
    while rows := db.execute("select lease, seq from pgmb.receive('q', 2000)").fetchall():
        got += [seq for _, seq in rows]
        db.execute("select pgmb.ack(%s)", [rows[0][0]])
    assert len(got) == 6000
    assert got == sorted(got)


@pytest.mark.parametrize("options", ["", ", ordered => true, shards => 1"])
def test_a_short_statement_timeout_does_not_stop_a_queue(db: Connection, options: str) -> None:
    """A receive over events that do not match ends before the timeout, and the next one goes on there."""
    db.execute(f"select pgmb.create_queue('q', '{{*.#.wanted}}'{options})")
    # Long topics take a regular expression long.
    fill(db, 120_000, topic=".".join(["a"] * 40))
    publish(db, 1, topic="a.wanted")
    deadline = time.monotonic() + 30
    lease = None
    db.execute("set statement_timeout = '100 ms'")
    while lease is None:
        assert time.monotonic() < deadline, "no receive got to the event"
        try:
            lease = receive(db)
        except psycopg.errors.QueryCanceled:
            # A busy machine may cancel a receive in time. It must not cancel all of them.
            continue
