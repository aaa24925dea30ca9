"""What status tells stays true while maintenance runs."""

from __future__ import annotations

from typing import Any

import psycopg


def test_the_rate_of_a_queue_survives_maintenance(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish_many('a', array(select to_json(n) from generate_series(1, 100) n))")
    for _ in range(5):
        db.execute("select pgmb.ack((select lease from pgmb.receive('q', 20) limit 1))")
    db.execute("select pgmb.maintain()")
    assert db.execute("select received_per_second from pgmb.queue_status").fetchall() == [(10.0,)]
    db.execute("update pgmb.claim set at = at - interval '10 seconds'")
    db.execute("select pgmb.maintain()")
    assert db.execute("select received_per_second from pgmb.queue_status").fetchall() == [(0.0,)]
    assert db.execute("select count(*) from pgmb.claim").fetchall() == [(1,)], "the queue's position"
