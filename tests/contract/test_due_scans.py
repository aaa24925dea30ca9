"""Scans for due rows start where the last one ended, and so do not pass dead rows that a pinned xmin keeps.

Cost is index entries read, not time: the same on every machine and under any load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from harness.states import add_deliveries, age_waiting, queue_names, queue_number, take_snapshot

pytestmark = pytest.mark.new_database

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]


def pin(connect: Connect) -> Connection:
    """Keeps vacuum, and every index scan, from removing what is dead."""
    pinned = connect(autocommit=False)
    pinned.execute("set transaction isolation level repeatable read")
    take_snapshot(pinned)
    return pinned


def entries(db: Connection, statement: str) -> int:
    """Index entries that a statement reads. The minimum of several, because some scans start earlier."""

    def read() -> int:
        ((count,),) = db.execute(
            "select coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0)"
            " from pg_index where indrelid::regclass::text like 'pgmb.%'"
        ).fetchall()
        return int(count)

    def once() -> int:
        # Receives scan for expired leases and due rows every 50 ms.
        time.sleep(0.06)
        with db.transaction():
            before = read()
            db.execute(statement)
            return read() - before

    return min(once() for _ in range(6))


def take_retries(db: Connection) -> None:
    """Two hundred events fail once and are then settled."""
    db.execute("select pgmb.publish('t', '1', key => 'k' || g) from generate_series(1, 200) g")
    ((lease,),) = db.execute("select distinct lease from pgmb.receive('q', 1000)").fetchall()
    db.execute("select pgmb.retry(%s, null, '0')", [lease])
    time.sleep(0.11)
    for (again,) in db.execute("select distinct lease from pgmb.receive('q', 1000)").fetchall():
        db.execute("select pgmb.ack(%s)", [again])


def take_delayed(db: Connection) -> None:
    db.execute("select pgmb.publish('t', '1', delay => '10 ms') from generate_series(1, 200)")
    time.sleep(0.12)
    db.execute("select pgmb.tick()")


def take_deliveries(db: Connection) -> None:
    """Two hundred events fail at an endpoint and are then delivered."""
    db.execute("select pgmb.publish('t', '1') from generate_series(1, 200)")
    (queue,) = [name for name in queue_names(db) if name != "q"]
    rows = db.execute(
        "select lease, seq, endpoints[1] from pgmb.receive_deliveries(%s, 1000)", [queue]
    ).fetchall()
    db.execute(
        "select pgmb.settle_deliveries(%s, null, %s::bigint[], %s::uuid[],"
        " array_fill('0'::interval, array[200]), array_fill(null::text, array[200]),"
        " array_fill(true, array[200]), array_fill(false, array[200]))",
        [rows[0][0], [row[1] for row in rows], [row[2] for row in rows]],
    )
    time.sleep(0.11)
    claimed = db.execute("select lease, delivery from pgmb.claim_deliveries(1000, room => 1000)").fetchall()
    assert len(claimed) == 200
    db.execute("select pgmb.settle_claimed(%s, %s::bigint[])", [claimed[0][0], [row[1] for row in claimed]])


def take_claims(db: Connection) -> None:
    for _ in range(100):
        db.execute("select pgmb.publish('t', '1')")
        ((lease,),) = db.execute("select lease from pgmb.receive('q')").fetchall()
        db.execute("select pgmb.ack(%s)", [lease])
    db.execute("select pgmb.clear_settled()")


def drain(db: Connection) -> None:
    while rows := db.execute("select distinct lease from pgmb.receive('q', 1000)").fetchall():
        db.execute("select pgmb.ack(%s)", rows[0])


RECEIVE = "select * from pgmb.receive('q')"


@pytest.mark.parametrize(
    ("take", "statement", "options"),
    [
        pytest.param(take_retries, RECEIVE, "", id="retries"),
        pytest.param(take_retries, RECEIVE, ", max_in_flight => 1000", id="retries of a limited queue"),
        pytest.param(
            take_retries, RECEIVE, ", ordered => true, shards => 1", id="retries of an ordered queue"
        ),
        pytest.param(take_retries, RECEIVE, ", fair_by => 'key'", id="retries of a fair queue"),
        pytest.param(take_delayed, "select pgmb.tick()", "", id="delayed events, tick"),
        pytest.param(take_delayed, "select pgmb.maintain()", "", id="delayed events, maintain"),
        pytest.param(take_delayed, RECEIVE, "", id="delayed events, receive"),
        pytest.param(take_deliveries, "select * from pgmb.claim_deliveries()", "", id="deliveries"),
        pytest.param(take_claims, "select pgmb.clear_settled()", "", id="claims"),
    ],
)
def test_scans_do_not_pass_dead_rows(
    db: Connection, connect: Connect, take: Callable[[Connection], None], statement: str, options: str
) -> None:
    db.execute(f"select pgmb.create_queue('q'{options})")
    db.execute("select pgmb.create_endpoint('e', 'http://localhost/')")
    take(db)
    pinned = pin(connect)
    take(db)
    drain(db)
    before = entries(db, statement)
    for _ in range(5):
        take(db)
    drain(db)
    after = entries(db, statement)
    # A thousand rows are dead by now.
    assert after <= before + 100, f"{before} entries before, {after} after"
    pinned.rollback()


def stored_start(db: Connection) -> str:
    """Where the session's next scan of the queue's retries starts."""
    ((setting,),) = db.execute("select current_setting(%s)", [f"pgmb.retry_{queue_number(db)}"]).fetchall()
    return str(setting)


def dead_retries(db: Connection, connect: Connect) -> Connection:
    """A queue with many dead retries, and a session that has stored where its next scan starts."""
    db.execute("select pgmb.create_queue('q')")
    pinned = pin(connect)
    take_retries(db)
    take_retries(db)
    assert db.execute("select * from pgmb.receive('q')").fetchall() == []
    assert stored_start(db)
    return pinned


def received_within(db: Connection, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if rows := db.execute("select * from pgmb.receive('q')").fetchall():
            return len(rows)
        time.sleep(0.01)
    return 0


def test_a_retry_that_is_committed_late_is_found(db: Connection, connect: Connect) -> None:
    dead_retries(db, connect)
    db.execute("select pgmb.publish('t', '1')")
    ((lease,),) = db.execute("select lease from pgmb.receive('q')").fetchall()
    late = connect(autocommit=False)
    late.execute("select pgmb.retry(%s, null, '0')", [lease])
    # Scans pass its due time.
    assert received_within(db, 0.5) == 0
    late.commit()
    assert received_within(db, 5) == 1


def test_a_retry_with_an_old_due_time_is_found(db: Connection, connect: Connect) -> None:
    dead_retries(db, connect)
    db.execute("select pgmb.publish('t', '1')")
    ((lease,),) = db.execute("select lease from pgmb.receive('q')").fetchall()
    db.execute("select pgmb.retry(%s, null, '1 hour')", [lease])
    age_waiting(db, "1 day")
    assert received_within(db, 5) == 1


def test_deliveries_to_a_resumed_endpoint_are_found_at_once(db: Connection) -> None:
    db.execute("select pgmb.create_endpoint('e', 'http://localhost/')")
    add_deliveries(db, 20_000)
    db.execute("select pgmb.set_endpoint_state('e', 'paused')")
    time.sleep(1.1)
    # The scan passes so many deliveries to the paused endpoint that its end is stored for seconds.
    assert db.execute("select * from pgmb.claim_deliveries()").fetchall() == []
    db.execute("select pgmb.set_endpoint_state('e', 'active')")
    assert len(db.execute("select * from pgmb.claim_deliveries()").fetchall()) == 10


def test_a_rollback_restores_the_start(db: Connection, connect: Connect) -> None:
    dead_retries(db, connect)

    before = stored_start(db)
    # The setting has expired.
    time.sleep(1.1)
    with db.transaction(force_rollback=True):
        assert db.execute("select * from pgmb.receive('q')").fetchall() == []
        assert stored_start(db) != before
    assert stored_start(db) == before


def test_a_stored_start_expires(db: Connection, connect: Connect) -> None:
    """It also expires when the clock is set back, because the rest of its lifetime is then too long."""
    dead_retries(db, connect)
    setting = stored_start(db)
    for shift, counts in (("0", True), ("-1 hour", False), ("1 hour", False)):
        ((since,),) = db.execute(
            "select pgmb_internal.time_of_start(%s, to_timestamp(%s::bigint / 1e6) + %s::interval)::text",
            [setting, setting.split()[3], shift],
        ).fetchall()
        assert (since != "-infinity") is counts, shift


@pytest.mark.parametrize(
    ("last", "now", "earlier"),
    [(100.2, 100.9, 0.1), (100.9, 101.1, 2), (101.9, 102.1, 4), (99.9, 100.1, 8), (100.2, 109.0, 16)],
)
def test_the_less_often_scans_start_the_earlier(
    db: Connection, last: float, now: float, earlier: float
) -> None:
    setting = f"{200 * 10**6} {200 * 10**6} {50 * 10**6} {int(last * 10**6)}"
    ((found,),) = db.execute(
        "select extract(epoch from pgmb_internal.time_of_start(%s, to_timestamp(%s)))::float8", [setting, now]
    ).fetchall()
    assert found == pytest.approx(50 - earlier)
