"""A consumer of queue mine tries to reach queue yours, its leases, and the rest of the broker."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

ATTEMPTS = [
    "select * from pgmb.receive('yours')",
    "select * from pgmb.receive_any('{yours}')",
    "select * from pgmb.receive_group('yours')",
    "select pgmb.ack('<lease>')",
    "select pgmb.ack('<lease>', '{1}')",
    "select pgmb.retry('<lease>')",
    "select pgmb.bury('<lease>')",
    "select pgmb.extend('<lease>', '1 day')",
    "select pgmb.release('<lease>')",
    "select pgmb.seek('yours', pgmb.earliest('main'))",
    "select pgmb.purge('yours')",
    "select pgmb.pause('yours')",
    "select pgmb.resume('yours')",
    "select pgmb.redrive('yours')",
    "select pgmb.drop_dead('yours')",
    "select pgmb.queue_depth('yours')",
    "select pgmb.next_events('yours')",
    "select * from pgmb.pending_messages('yours')",
    "select * from pgmb.dead_letters('yours')",
    "select pgmb.bind('mine', '{#}')",
    "select pgmb.drop_queue('mine')",
    "select pgmb.create_queue('evil')",
    "select pgmb.publish('t', '1')",
    "select * from pgmb.log_main",
    "select * from pgmb.claim",
    "select * from pgmb.retry",
    "delete from pgmb.claim",
    "lock table pgmb.claim in access exclusive mode",
    "select pgmb.grant_consume('yours', current_user)",
    "select pgmb.maintain()",
    "set role pgmb_admin",
]


@pytest.fixture(scope="module")
def consumer(target: Target) -> psycopg.Connection[Any]:
    return target.role("consumer", "select pgmb.grant_consume('mine', '{}')")


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_a_consumer_is_refused(target: Target, consumer: psycopg.Connection[Any], attempt: str) -> None:
    target.refuses(consumer, attempt)


def test_it_may_receive_from_its_queue(consumer: psycopg.Connection[Any]) -> None:
    with consumer.transaction(force_rollback=True):
        assert len(consumer.execute("select * from pgmb.receive('mine')").fetchall()) == 1
