"""Promise: a lease is settled rightly inside a REPEATABLE READ or SERIALIZABLE transaction, or not at all.

The transaction's snapshot may be older than the lease, its takeover, or what others settled of it. Then the
call raises 40001 (run the transaction again) or MB011 (lost), and changes nothing. Receiving needs READ
COMMITTED.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import retries_leased, take_snapshot, until_swept

LEVELS = ["repeatable read", "serializable"]
SETTLE = [
    "ack(%s)",
    "ack(%s, '{1}')",
    "retry(%s, after => '0 s')",
    "retry(%s, '{1}', '0 s')",
    "bury(%s)",
    "bury(%s, '{1}')",
    "release(%s)",
    "release(%s, '{1}')",
    "extend(%s)",
]


def refused(*sqlstates: str) -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate in sqlstates)


@pytest.fixture
def queue(sessions: Sessions) -> Sessions:
    sessions["admin"].run("select pgmb.create_queue('q', backoff_jitter => 0)")
    return sessions


def lease_of(session: Session, of: str, lease_for: str = "30 s") -> Any:
    """A lease of the events 1 and 2, delivered for the first or the second time."""
    for number in (1, 2):
        session.run("select pgmb.publish('t', to_json(%s::int))", [number])
    if of == "retried":
        session.run("select pgmb.retry(min(lease::text)::uuid, after => '0 s') from pgmb.receive('q')")
    rows = session.run("select lease from pgmb.receive('q', lease_for => %s)", [lease_for])
    assert len(rows) == 2
    return rows[0][0]


def begin(session: Session, level: str) -> None:
    session.run(f"begin isolation level {level}")
    take_snapshot(session)


def payloads(session: Session) -> list[Any]:
    return [payload for (payload,) in session.run("select payload from pgmb.receive('q')")]


@pytest.mark.parametrize("of", ["fresh", "retried"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", SETTLE)
def test_a_lease_is_settled_with_the_transaction(queue: Sessions, how: str, level: str, of: str) -> None:
    app, other = queue.open("app", "other")
    lease = lease_of(other, of)
    begin(app, level)
    assert app.value(f"select pgmb.{how}", [lease])
    app.run("rollback")
    begin(app, level)
    assert app.value(f"select pgmb.{how}", [lease])
    app.run("commit")


@pytest.mark.parametrize("of", ["fresh", "retried"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", SETTLE)
def test_a_lease_taken_over_after_the_snapshot_is_not_settled(
    queue: Sessions, how: str, level: str, of: str
) -> None:
    app, other = queue.open("app", "other")
    lease = lease_of(other, of, "1 ms")
    begin(app, level)
    until_swept(other)
    assert payloads(other) == [1, 2]
    with refused("40001", "MB011"):
        app.run(f"select pgmb.{how}", [lease])
    app.run("rollback")
    assert retries_leased(other) == 2
    assert other.run("select from pgmb.dead") == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", SETTLE)
def test_a_lease_superseded_after_the_snapshot_is_not_settled(queue: Sessions, how: str, level: str) -> None:
    app, long, other = queue.open("app", "long", "other")
    other.run("select pgmb.publish('t', '1')")
    long.run("begin")
    ((stale,),) = long.run("select lease from pgmb.receive('q')")
    begin(app, level)
    assert payloads(other) == [1]
    long.run("commit")
    with refused("40001", "MB011"):
        app.run(f"select pgmb.{how}", [stale])
    app.run("rollback")
    with refused("MB011"):
        app.run(f"select pgmb.{how}", [stale])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", SETTLE)
def test_a_lease_newer_than_the_snapshot_asks_for_another_try(queue: Sessions, how: str, level: str) -> None:
    app, other = queue.open("app", "other")
    begin(app, level)
    lease = lease_of(other, "fresh")
    with refused("40001"):
        app.run(f"select pgmb.{how}", [lease])
    app.run("rollback")
    begin(app, level)
    assert app.value(f"select pgmb.{how}", [lease])
    app.run("commit")


@pytest.mark.parametrize("of", ["fresh", "retried"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["retry(%s, after => '0 s')", "bury(%s)", "release(%s)"])
def test_what_was_acked_after_the_snapshot_does_not_come_again(
    queue: Sessions, how: str, level: str, of: str
) -> None:
    app, other = queue.open("app", "other")
    lease = lease_of(other, of)
    begin(app, level)
    assert other.value("select pgmb.ack(%s, '{1}')", [lease]) == 1
    with refused("40001"):
        app.run(f"select pgmb.{how}", [lease])
    app.run("rollback")
    begin(app, level)
    assert app.value(f"select pgmb.{how}", [lease]) == 1
    app.run("commit")
    assert payloads(other) == ([] if how.startswith("bury") else [2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "call", ["receive('q')", "receive_any('{q}')", "receive('q', ack => gen_random_uuid())", "purge('q')"]
)
def test_receiving_refuses_an_old_snapshot(queue: Sessions, call: str, level: str) -> None:
    """It would sweep without seeing what was settled since, and deliver that again."""
    app, other = queue.open("app", "other")
    lease = lease_of(other, "fresh", "1 ms")
    begin(app, level)
    assert other.value("select pgmb.ack(%s)", [lease]) == 2
    with refused("MB029"):
        app.run(f"select pgmb.{call}")
    app.run("rollback")
    assert payloads(other) == []
