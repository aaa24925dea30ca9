"""A call that settles a lease of a queue that is gone reports the lease as lost or the queue as dropped.

Promise: no such call raises an error of a table's constraint, whenever the queue was dropped or converted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import expire, keep_from_dying

# What the calls do does not depend on PostgreSQL's version.
pytestmark = pytest.mark.once

CALLS = {
    "ack": "pgmb.ack(%(lease)s)",
    "ack of a part": "pgmb.ack(%(lease)s, %(part)s)",
    "retry": "pgmb.retry(%(lease)s, error => 'x')",
    "retry of a part": "pgmb.retry(%(lease)s, %(part)s)",
    "last retry": "pgmb.retry(%(lease)s, %(part)s, together => true)",
    "bury": "pgmb.bury(%(lease)s, error => 'x')",
    "bury of a part": "pgmb.bury(%(lease)s, %(part)s)",
    "release": "pgmb.release(%(lease)s)",
    "release of a part": "pgmb.release(%(lease)s, %(part)s)",
    "last release": "pgmb.release(%(lease)s, bury_after => '0')",
    "extend": "pgmb.extend(%(lease)s, '1 minute')",
    "extend by the queue's own": "pgmb.extend(%(lease)s)",
    "settle_deliveries": "pgmb.settle_deliveries(%(lease)s)",
    "settle_deliveries that failed": "pgmb.settle_deliveries(%(lease)s, %(part)s, %(part)s,"
    " array[gen_random_uuid()], '{1 s}', '{x}', '{true}', '{false}')",
    "settle_deliveries that failed for good": "pgmb.settle_deliveries(%(lease)s, null, %(part)s,"
    " array[gen_random_uuid()], '{1 s}', '{x}', '{true}', '{true}')",
    "receive with an ack": "count(*) from pgmb.receive('other', 1, ack => %(lease)s)",
}

MAY_SUCCEED = {"ack", "ack of a part", "settle_deliveries", "receive with an ack"}
"""A lease that a transaction took while its queue was dropped can be acked: the events are done with."""


class Held(NamedTuple):
    session: Session
    lease: UUID
    part: list[int]


def receive(session: Session) -> Held:
    rows = session.run("select lease, seq from pgmb.receive('q', 3, '1 hour')")
    assert len(rows) == 3
    return Held(session, rows[0][0], [rows[0][1]])


def dropped(sessions: Sessions) -> Held:
    held = receive(sessions["consumer"])
    sessions["admin"].run("select pgmb.drop_queue('q')")
    return held


def dropped_beside_a_receive(sessions: Sessions) -> Held:
    consumer = sessions["consumer"]
    consumer.run("begin")
    held = receive(consumer)
    sessions["admin"].run("select pgmb.drop_queue('q')")
    return held


def dropped_before_the_receive_committed(sessions: Sessions) -> Held:
    held = dropped_beside_a_receive(sessions)
    held.session.run("commit")
    return held


def dropped_under_retries(sessions: Sessions) -> Held:
    held = receive(sessions["consumer"])
    held.session.run("select pgmb.retry(%s, after => '0')", [held.lease])
    return dropped(sessions)


def converted_after_the_lease_expired(sessions: Sessions) -> Held:
    held = receive(sessions["consumer"])
    expire(sessions["admin"].connection, held.lease)
    sessions["admin"].run("select pgmb.convert_queue('q', ordered => true, shards => 2)")
    return held


GONE = [
    dropped,
    dropped_beside_a_receive,
    dropped_before_the_receive_committed,
    dropped_under_retries,
    converted_after_the_lease_expired,
]


def outcome(held: Held, call: str) -> str:
    """The error that a call raises. What it did is undone."""
    held.session.run("savepoint before")
    try:
        held.session.run(f"select {call}", {"lease": held.lease, "part": held.part})
    except psycopg.Error as error:
        return f"{error.sqlstate}"
    finally:
        held.session.run("rollback to before")
    return "done"


@pytest.mark.parametrize("lanes", [None, ["t.urgent"]], ids=["plain", "lanes"])
@pytest.mark.parametrize("gone", GONE, ids=lambda gone: gone.__name__)
def test_settling_calls_report_a_queue_that_is_gone(
    sessions: Sessions, gone: Callable[[Sessions], Held], lanes: Any
) -> None:
    admin = sessions["admin"]
    admin.run("select pgmb.create_queue('other')")
    admin.run("select pgmb.create_queue('q', max_attempts => 2, lanes => %s)", [lanes])
    admin.run("select pgmb.publish('t.mild', '{}', key => 'a') from generate_series(1, 3)")
    held = gone(sessions)
    if held.session.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        held.session.run("begin")
    outcomes = {name: outcome(held, call) for name, call in CALLS.items()}
    held.session.run("rollback")
    allowed = {name: {"MB011", "MB002"} | ({"done"} if name in MAY_SUCCEED else set()) for name in CALLS}
    assert {name: got for name, got in outcomes.items() if got not in allowed[name]} == {}


DEAD_LETTERS = ["last retry", "bury", "bury of a part", "last release"]


@pytest.mark.parametrize("call", DEAD_LETTERS)
def test_a_drop_between_a_call_and_its_dead_letters_is_reported(sessions: Sessions, call: str) -> None:
    admin, consumer, other = sessions.open("admin", "consumer", "other")
    admin.run("select pgmb.create_queue('q', max_attempts => 1)")
    admin.run("select pgmb.publish('t', '{}') from generate_series(1, 3)")
    consumer.run("begin")
    held = receive(consumer)
    other.run("begin")
    keep_from_dying(other)
    settling = consumer.start(f"select {CALLS[call]}", {"lease": held.lease, "part": held.part}).blocked()
    dropping = admin.start("select pgmb.drop_queue('q')").blocked()
    other.run("commit")
    with pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == "MB002"):
        settling.result()
    consumer.run("rollback")
    assert dropping.result() == [(True,)]


def test_a_role_whose_grant_went_with_the_queue_is_told_so(sessions: Sessions) -> None:
    admin, consumer = sessions["admin"], sessions["consumer"]
    admin.run("select pgmb.create_queue('q')")
    admin.run("select pgmb.publish('t', '{}') from generate_series(1, 3)")
    admin.run("create role settling_dropped")
    try:
        admin.run("select pgmb.grant_consume('q', 'settling_dropped')")
        consumer.run("set session authorization settling_dropped")
        held = dropped(sessions)
        consumer.run("begin")
        calls = {
            name: call for name, call in CALLS.items() if "deliveries" not in name and "other" not in call
        }
        outcomes = {name: outcome(held, call) for name, call in calls.items()}
        assert outcomes == dict.fromkeys(calls, "MB002")
    finally:
        consumer.run("rollback")
        consumer.run("reset session authorization")
        admin.run("drop owned by settling_dropped")
        admin.run("drop role settling_dropped")


@pytest.mark.parametrize("retried", [False, True], ids=["fresh", "retried"])
def test_a_drop_waits_for_a_transaction_that_settles(sessions: Sessions, retried: bool) -> None:
    """A drop that held the queue's row while it waits would make the other's dead letters a deadlock."""
    admin, consumer = sessions["admin"], sessions["consumer"]
    admin.run("select pgmb.create_queue('q')")
    admin.run("select pgmb.publish('t', '{}') from generate_series(1, 3)")
    held = receive(consumer)
    if retried:
        consumer.run("select pgmb.retry(%s, after => '0')", [held.lease])
        held = receive(consumer)
    consumer.run("begin")
    assert consumer.value("select pgmb.ack(%s, %s)", [held.lease, held.part]) == 1
    dropping = admin.start("select pgmb.drop_queue('q')").blocked()
    assert consumer.value("select pgmb.bury(%s)", [held.lease]) == 2
    consumer.run("commit")
    assert dropping.result() == [(True,)]
