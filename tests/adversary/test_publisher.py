"""A publisher of stream main tries to read, to publish elsewhere, to forge and to stop others."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

ATTEMPTS = [
    "select pgmb.publish('t', '1', stream => 'other')",
    "insert into pgmb.log_other (topic, payload) values ('t', '1')",
    "insert into pgmb.log_main (topic, payload, published_at) values ('t', '1', 'infinity')",
    "insert into pgmb.log_main (topic, payload, published_at) values ('t', '1', '-infinity')",
    "insert into pgmb.log_main (topic, payload, seq) values ('t', '1', 1)",
    "insert into pgmb.log_main (topic, payload, xid) values ('t', '1', '1')",
    "insert into pgmb.segment_1_0 (topic, payload) values ('t', '1')",
    "insert into pgmb.segment_1_1 (xid, seq, topic, payload) values ('1', 1, 't', '1')",
    "select * from pgmb.segment_1_0",
    "lock table pgmb.segment_1_0 in share mode",
    "insert into pgmb.log_main (topic, payload) values (repeat('x', 16000), '1')",
    "insert into pgmb.log_main (topic, key, payload) values ('t', repeat('x', 16000), '1')",
    "select pgmb.publish('t', '1', key => repeat('x', 16000))",
    "select * from pgmb.log_main",
    "select * from pgmb.delayed",
    "delete from pgmb.delayed",
    "update pgmb.log_main set topic = 'x'",
    "lock table pgmb.delayed in access exclusive mode",
    "lock table pgmb.log_main in access exclusive mode",
    "lock table pgmb.log_main in share mode",
    "truncate pgmb.delayed",
    "select setval('pgmb.seq_main', 1)",
    "select * from pgmb.receive('yours')",
    "select pgmb.ack('<lease>')",
    "select * from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main'))",
    "select * from pgmb.browse('main')",
    "select pgmb.create_queue('evil')",
    "select pgmb.maintain()",
    (
        "create trigger evil before insert on pgmb.log_main"
        " for each row execute function suppress_redundant_updates_trigger()"
    ),
    "select * from pgmb.dispatched_endpoints()",
    "set role pgmb_admin",
]


@pytest.fixture(scope="module")
def publisher(target: Target) -> psycopg.Connection[Any]:
    return target.role("publisher", "select pgmb.grant_publish('main', '{}')")


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_a_publisher_is_refused(target: Target, publisher: psycopg.Connection[Any], attempt: str) -> None:
    target.refuses(publisher, attempt)


def test_it_may_publish_to_its_stream(publisher: psycopg.Connection[Any]) -> None:
    with publisher.transaction(force_rollback=True):
        publisher.execute("select pgmb.publish('t', '1')")
