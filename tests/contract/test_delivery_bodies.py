"""Payloads of deliveries that wait: in the log, and copied only when their segment is dropped."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.segments import seal
from harness.sessions import Sessions
from harness.states import age_segments, bytes_waiting, deliveries_waiting
from tests.contract.endpoints import create, dead, publish, settle, value, waiting

Connection = psycopg.Connection[Any]
_SEALED = "select count(*) from pgmb.segment where sealed_at is not null and dropped_at is null"
_LARGE = 320_002
"""Bytes of a large payload."""


def fail_for(db: Connection, *endpoints: Any, last: bool = False) -> None:
    """Receive one event, and report that each of these endpoints did not get it."""
    ((lease, seq),) = db.execute("select lease, seq from pgmb.receive_deliveries('webhooks')").fetchall()
    settle(db, lease, [seq], [(seq, endpoint, "0", "no", True, last) for endpoint in endpoints])


def publish_large(db: Connection) -> None:
    db.execute(
        "select pgmb.publish('t', to_json(string_agg(md5(n::text), ''))) from generate_series(1, 10000) n"
    )


def close_segment(db: Connection) -> None:
    """Seal the open segment, with all events received, and make it old enough to be dropped."""
    seal(db)
    publish(db, 0, topic="other")
    while db.execute("select from pgmb.receive_deliveries('webhooks')").fetchall():
        pass
    age_segments(db, "8 days")


def test_an_event_is_not_stored_for_each_endpoint_that_waits_for_it(db: Connection) -> None:
    endpoints = [create(db, f"e{number}") for number in range(20)]
    publish_large(db)
    before = bytes_waiting(db)
    fail_for(db, *endpoints)
    assert deliveries_waiting(db) == 20
    assert bytes_waiting(db) - before < _LARGE, "twenty rows, and no payload"
    bodies = db.execute("select octet_length(payload) from pgmb.claim_deliveries()").fetchall()
    assert bodies == [(_LARGE,)] * 20


def test_what_waits_when_its_segment_is_dropped_is_delivered_all_the_same(db: Connection) -> None:
    first, second = create(db, "first", "{t}"), create(db, "second", "{t}")
    publish(db, 7)
    fail_for(db, first, second)
    close_segment(db)
    db.execute("select pgmb.maintain()")
    assert value(db, _SEALED) == 0
    assert set(waiting(db)) == {(first, 7, 2, "no"), (second, 7, 2, "no")}
    got = db.execute("select endpoint, payload::int from pgmb.claim_deliveries()").fetchall()
    assert sorted(got) == sorted([(first, 7), (second, 7)])


def test_a_dead_letter_has_the_payload_of_the_log(db: Connection) -> None:
    first, second = create(db, "first", "{t}"), create(db, "second", "{t}")
    publish(db, 7)
    fail_for(db, first, last=True)
    publish(db, 8)
    fail_for(db, second)
    lease, rows = value_of_claim(db)
    db.execute(
        "select pgmb.settle_claimed(%s, '{}', %s, '{null}', '{gone}', '{true}', '{true}')", [lease, rows]
    )
    assert dead(db) == [(first, 7, 1, "no"), (second, 8, 2, "gone")]
    assert waiting(db) == []


def value_of_claim(db: Connection) -> tuple[Any, list[int]]:
    rows = db.execute("select lease, delivery from pgmb.claim_deliveries()").fetchall()
    return rows[0][0], [row for _, row in rows]


@pytest.mark.new_database
def test_a_segment_is_not_emptied_while_an_event_of_it_is_copied_in_parts(db: Connection) -> None:
    endpoints = [create(db, f"e{number}", "{t}") for number in range(3)]
    db.execute(
        "create or replace function pgmb_internal.batch_bytes() returns bigint language sql immutable"
        " return 400000"
    )
    publish_large(db)
    fail_for(db, *endpoints)
    close_segment(db)
    left = []
    for _ in range(4):
        db.execute("select pgmb.drop_segments()")
        left.append(value(db, _SEALED))
    assert left == [1, 1, 0, 0]
    sizes = [
        octets
        for _ in range(3)
        for (octets,) in db.execute("select octet_length(payload) from pgmb.claim_deliveries()").fetchall()
    ]
    assert sizes == [_LARGE] * 3


def test_a_failure_that_is_reported_while_its_segment_is_dropped_keeps_its_payload(
    db: Connection, sessions: Sessions
) -> None:
    endpoint = create(db, "e", "{t}")
    publish(db, 7)
    ((lease, seq),) = db.execute("select lease, seq from pgmb.receive_deliveries('webhooks')").fetchall()
    close_segment(db)
    db.execute("select pgmb.alter_stream('main', drop_unread => true)")
    dispatcher = sessions["dispatcher"]
    dispatcher.run("begin")
    dispatcher.run(
        f"select pgmb.settle_deliveries('{lease}', array[{seq}]::bigint[], array[{seq}]::bigint[],"
        f" array['{endpoint}']::uuid[], '{{0}}', '{{no}}', '{{true}}', '{{false}}')"
    )
    # The report has read the segment: until it commits, the segment stays.
    db.execute("select pgmb.drop_segments()")
    assert value(db, _SEALED) == 1
    dispatcher.run("commit")
    db.execute("select pgmb.drop_segments()")
    assert value(db, _SEALED) == 0
    assert waiting(db) == [(endpoint, 7, 2, "no")]
