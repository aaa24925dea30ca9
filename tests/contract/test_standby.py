"""Promise 24: positions are taken on the primary only; a replica reads between them once it has replayed
them.

On a hot standby pg_current_snapshot() lists nothing as in progress: whoever trusted it would lose a
transaction that is open on the primary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.server import Server
from tests.conftest import FreshServer

READ = (
    "select seq, id, topic, key, payload::text, headers::text, published_at"
    " from pgmb.between('main', %s::pgmb.position, %s::pgmb.position)"
)


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def refused(db: psycopg.Connection[Any], sqlstate: str, statement: str, *parameters: Any) -> None:
    with pytest.raises(psycopg.Error) as caught:
        db.execute(statement, parameters)
    assert caught.value.sqlstate == sqlstate


@pytest.fixture
def pair(fresh_server: FreshServer, install: Any) -> Iterator[tuple[Server, Server]]:
    primary = fresh_server(name="primary")
    install(primary.dsn())
    with primary.connect() as db:
        db.execute("select pgmb.create_queue('q')")
        db.execute("select pgmb.publish('t', '0')")
    with primary.standby() as standby:
        yield primary, standby


def test_a_standby_serves_positions_of_the_primary_and_takes_over(pair: tuple[Server, Server]) -> None:
    primary, standby = pair
    db = primary.connect()
    late = psycopg.connect(primary.dsn())
    start = value(db, "select pgmb.earliest()::text")
    late.execute("select pgmb.publish('late', '1')")
    db.execute("select pgmb.publish('t', '2')")
    middle = value(db, "select pgmb.position()::text")
    tick = value(db, "select tick from pgmb.newest_tick()")
    standby.wait_for_replay(primary)
    replica = standby.connect()

    # A standby refuses to say where the log stands: the open transaction would look finished.
    for statement in ("pgmb.position()", "pgmb.tick()", "pgmb.create_queue('other')", "pgmb.maintain()"):
        refused(replica, "MB020", f"select {statement}")
    refused(replica, "MB020", "select * from pgmb.receive('q')")
    visible = value(
        replica, "select pg_visible_in_snapshot(%s::text::xid8, pg_current_snapshot())", late_xid(late)
    )

    first = db.execute(READ, [start, middle]).fetchall()
    assert [row[4] for row in first] == ["0", "2"]
    assert replica.execute(READ, [start, middle]).fetchall() == first
    assert value(replica, "select pgmb.position_of('main', %s)::text", tick) == value(
        db, "select pgmb.position_of('main', %s)::text", tick
    )

    # Replay is held back: a newer position is refused until it is there.
    replica.execute("select pg_wal_replay_pause()")
    old = psycopg.connect(standby.dsn())
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert old.execute(READ, [start, middle]).fetchall() == first
    late.commit()
    db.execute("select pgmb.publish('t', '3')")
    end = value(db, "select pgmb.position()::text")
    refused(replica, "MB022", READ, middle, end)
    assert replica.execute(READ, [start, middle]).fetchall() == first
    replica.execute("select pg_wal_replay_resume()")
    standby.wait_for_replay(primary)
    # A transaction's snapshot from before does not hold it yet.
    refused(old, "MB022", READ, middle, end)
    second = db.execute(READ, [middle, end]).fetchall()
    assert [row[4] for row in second] == ["1", "3"]
    assert replica.execute(READ, [middle, end]).fetchall() == second
    old.rollback()
    assert old.execute(READ, [middle, end]).fetchall() == second
    old.close()

    # Failover: what was leased can be settled, what was not comes, late or not.
    leased = db.execute("select lease, payload from pgmb.receive('q', 2)").fetchall()
    late.execute("select pgmb.publish('late', '98')")
    standby.wait_for_replay(primary)
    primary.kill()
    late.close()
    db.close()
    replica.close()
    standby.promote()
    with standby.connect() as new:
        assert value(new, "select pgmb.ack(%s)", leased[0][0]) == 2
        rest = new.execute("select lease, payload from pgmb.receive('q')").fetchall()
        everything = [row[1] for row in leased] + [row[1] for row in rest]
        assert sorted(everything) == [0, 1, 2, 3]
        assert value(new, "select pgmb.ack(%s)", rest[0][0]) == 2
        assert [row[4] for row in new.execute(READ, [middle, end]).fetchall()] == ["1", "3"]
        new.execute("select pgmb.publish('t', '4')")
        assert value(new, "select pgmb.tick()") > tick
        assert new.execute("select payload from pgmb.receive('q')").fetchall() == [(4,)]
        after = value(new, "select pgmb.position()::text")
        assert [row[4] for row in new.execute(READ, [end, after]).fetchall()] == ["4"]
        new.execute("select pgmb.rotate()")
        new.execute("select pgmb.maintain()")
    assert visible is True, "or the trap that this test is about was not there"


def late_xid(late: psycopg.Connection[Any]) -> str:
    return str(value(late, "select pg_current_xact_id()::text"))


def test_a_position_that_was_lost_in_a_failover_is_refused(pair: tuple[Server, Server]) -> None:
    primary, standby = pair
    with primary.connect() as db:
        before = value(db, "select pgmb.position()::text")
        standby.wait_for_replay(primary)
        with standby.connect() as replica:
            replica.execute("select pg_wal_replay_pause()")
        standby.stop("immediate")
        for _ in range(50):
            db.execute("select pgmb.publish_many('t', array_fill('\"lost\"'::json, array[1000]))")
        ahead = value(db, "select pgmb.position()::text")
    primary.kill()
    standby.start_again()
    standby.promote()
    with standby.connect() as new:
        refused(new, "MB023", READ, before, ahead)
        new.execute("select pgmb.publish('t', '\"kept\"')")
        now = value(new, "select pgmb.position()::text")
        assert [row[4] for row in new.execute(READ, [before, now]).fetchall()] == ['"kept"']
