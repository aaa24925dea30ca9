"""Promises: rotation, sealing and retention lose nothing and make no publisher wait, whoever stands still.

A publisher is stopped (SIGSTOP) in the middle of a COPY, in an open transaction after publishing, and idle,
each time across several rotations, while others publish, queues consume and segments are dropped.
"""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest

from faults.log import rotation
from harness.postgres import create_database
from harness.sessions import Sessions
from tests.conftest import FreshServer


@pytest.mark.slow
def test_a_stopped_publisher_loses_nothing_and_delays_nobody(fresh_server: FreshServer, install: Any) -> None:
    server = fresh_server(settings=rotation.SETTINGS)
    dsn = server.dsn(create_database(server))
    install(dsn)
    result = rotation.run(
        server, dsn, stopped_for=2.2, rounds=1, publishers=1, seed=random.randrange(1 << 30)
    )
    assert result.landed, str(result)
    assert result.verdict.clean, str(result)
    assert not result.maintenance.early, str(result)
    assert result.longest_wait <= rotation.LONGEST_WAIT, str(result)


def test_between_says_that_its_events_were_dropped_while_it_waited(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    """The reader listed the segment before it was emptied: it must not take the empty one for the truth."""
    db.execute("select pgmb.alter_stream('main', keep_for => '0')")
    (before,) = db.execute("select pgmb.position()::text").fetchall()[0]
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.seal()")
    reader, dropper = sessions.open("reader", "dropper")
    dropper.run("begin")
    assert dropper.value("select pgmb.drop_segments()") == 1
    reading = reader.start("select seq from pgmb.between('main', %s, pgmb.position())", [before]).blocked()
    dropper.run("commit")
    with pytest.raises(psycopg.errors.Error) as raised:
        reading.result()
    assert raised.value.sqlstate == "MB012"


def test_a_segment_that_was_emptied_outlives_those_who_look_into_it(
    sessions: Sessions, db: psycopg.Connection[Any]
) -> None:
    """Seal, empty and drop in one go, while a reader that has passed it still lists it as open."""
    db.execute("select pgmb.alter_stream('main', keep_for => '0')")
    db.execute("select pgmb.publish('t', '1')")
    (before,) = db.execute("select pgmb.position()::text").fetchall()[0]
    db.execute("select pgmb.rotate()")
    reader, janitor = sessions.open("reader", "janitor")
    janitor.run("begin")
    janitor.run("select pgmb.maintain()")
    reading = reader.start("select seq from pgmb.between('main', %s, pgmb.position())", [before]).blocked()
    janitor.run("commit")
    assert reading.result() == []


def test_an_idle_receive_takes_no_transaction_id_after_a_rotation(db: psycopg.Connection[Any]) -> None:
    """The sequence has jumped to the new segment: a look that finds nothing is not repeated for ever."""
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.ack(lease) from pgmb.receive('q')")
    db.execute("select pgmb.rotate()")
    db.execute("select from pgmb.receive('q')")
    for _ in range(5):
        with db.transaction():
            db.execute("select from pgmb.receive('q')")
            assert db.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)
