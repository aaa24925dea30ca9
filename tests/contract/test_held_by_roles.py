"""Promise: what a reader, a publisher and a consumer can lock stops neither maintenance nor other tenants.

Each makes every call that its grants allow, in a transaction that stays open. A call that a grant allows and
that is missing here fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harness.states import age_leases, kept_claims
from tests.contract.cast import Cast

WORKER = uuid4()

CALLS: dict[str, dict[str, str]] = {
    "reader": {
        "confirm": "pgmb.confirm('main', 'mine', pgmb.position('main'))",
        "forget": "pgmb.forget('main', 'forgotten')",
        "subscribe": "pgmb.subscribe('mine', '{t}')",
        "unsubscribe": "pgmb.unsubscribe((select pgmb.subscribe('mine', '{gone}')))",
        "keep_subscriptions": (
            "pgmb.keep_subscriptions(array[pgmb.subscribe('mine', '{kept}', expires_after => '1 h')])"
        ),
        "resume_subscriptions": "pgmb.resume_subscriptions('mine')",
        "tick": "pgmb.tick('main')",
        "position": "pgmb.position('main')",
        "newest": "pgmb.newest('main')",
        "between": (
            "(select count(*) from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main')))"
        ),
        "between_filtered": (
            "(select count(*) from pgmb.between_filtered('main', pgmb.earliest('main'), "
            "pgmb.position('main'),"
            " filter => '$.payload == 1'))"
        ),
        "between_group": (
            "(select count(*) from pgmb.between_group('mine', 'main', pgmb.earliest('main'), "
            "pgmb.position('main')))"
        ),
    },
    "publisher": {
        "publish": "pgmb.publish('t', '1', dedup_key => 'held'), pgmb.publish('t', '1', delay => '1 hour')",
        "publish_many": "pgmb.publish_many('t', array['1']::json[])",
        "claim_key": "pgmb.claim_key('main', 'claimed', gen_random_uuid(), '1 day')",
        "cancel": "pgmb.cancel((select pgmb.publish('t', '1', delay => '1 hour')))",
        "begin_tasks": "pgmb.begin_tasks('main', 'app', 1, '00000000-0000-0000-0000-000000000001')",
        "claim_task": "pgmb.claim_task('main', 'app', 1, 0, '00000000-0000-0000-0000-000000000001')",
        "abandon_tasks": "pgmb.abandon_tasks('main', 'other app', 1)",
        "claim_stage": "pgmb.claim_stage('main', 'staged', 1)",
        "send": "pgmb.send(gen_random_uuid(), 't', '1'::jsonb)",
    },
    "consumer": {
        "receive": "pgmb.receive('mine', 2)",
        "receive_any": "(select count(*) from pgmb.receive_any('{mine}', 2))",
        "ack": "pgmb.ack((select lease from pgmb.receive('mine', 1)))",
        "retry": "pgmb.retry((select lease from pgmb.receive('mine', 1)))",
        "bury": "pgmb.bury((select lease from pgmb.receive('mine', 1)))",
        "release": "pgmb.release((select lease from pgmb.receive('mine', 1)))",
        "extend": "pgmb.extend((select lease from pgmb.receive('mine', 1)), '1 minute')",
        "redrive": "pgmb.redrive('mine')",
        "drop_dead": "pgmb.drop_dead('mine', '{}')",
        "worker_heartbeat": (
            f"pgmb.worker_heartbeat('{WORKER}', 'host', 1, '{{mine}}', array[pg_backend_pid()])"
        ),
        "worker_depart": "pgmb.worker_depart(gen_random_uuid())",
        "declare_queue": f"pgmb.declare_queue('{WORKER}', 'mine', '{{#}}')",
        "bury_unreadable": "pgmb.bury_unreadable('mine', 'error', 1)",
        "runs_other_code": "pgmb.runs_other_code('mine', 'code')",
        "pause": "pgmb.pause('mine', 'held')",
        "resume": "pgmb.resume('mine')",
    },
}
# They lock what another call of their role locks, or rows of tables that the role itself owns.
COVERED = {
    *("assert_between", "divide", "lake_between", "passing", "passing_events", "projection_of"),
    *("attach_mutations", "push_table_mutations", "stop_table_mutations"),
    *("fresh_id", "holder_of_key", "finish_task", "publish_stage", "publish_tasks"),
    *("claim_next", "claims_from", "receive_group"),
}
GRANTS = {
    "reader": "pgmb.grant_read('main', %s)",
    "publisher": "pgmb.grant_publish('main', %s)",
    "consumer": "pgmb.grant_consume('mine', %s)",
}
TABLES = """
select c.oid::regclass::text, has_table_privilege(%(role)s, c.oid, 'insert')
from pg_class c where c.relnamespace = 'pgmb'::regnamespace and c.relkind in ('r', 'p')
  and (has_table_privilege(%(role)s, c.oid, 'select') or has_table_privilege(%(role)s, c.oid, 'insert'))
"""
ALLOWED = """
select distinct p.proname from pg_proc p
where p.pronamespace = 'pgmb'::regnamespace and p.provolatile = 'v'
  and has_function_privilege(%s, p.oid, 'execute')
"""


@pytest.fixture
def tenants(db: psycopg.Connection[Any]) -> None:
    """Two of them: one whose roles hold what they can, and one with work left for maintenance."""
    db.execute("select pgmb.create_stream('other', keep_for => '0 s', rotate_every => '0 s')")
    db.execute("select pgmb.create_queue('mine'), pgmb.create_queue('theirs', stream => 'other')")
    db.execute("select pgmb.publish_many('t', array_fill('1'::json, array[50]))")
    db.execute("select pgmb.publish('t', '1', stream => 'other', dedup_key => 'old', dedup_for => '1 ms')")
    for _ in range(10):
        db.execute("select pgmb.publish('t', '1', stream => 'other')")
        db.execute("select pgmb.ack(lease) from pgmb.receive('theirs')")
    age_leases(db)
    db.execute("select pgmb.subscribe('theirs', '{t}', stream => 'other', expires_after => '1 ms')")
    # Expired, and locked by its reader.
    db.execute("select pgmb.subscribe('mine', '{expired}', expires_after => '1 ms')")


@pytest.fixture
def holding(
    db: psycopg.Connection[Any], cast: Cast, tenants: None
) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    held: dict[str, psycopg.Connection[Any]] = {}
    try:
        for name, grant in GRANTS.items():
            role = cast.role(name)
            db.execute(f"select {grant}".encode(), [role])
            allowed = {call for (call,) in db.execute(ALLOWED, [role])}
            assert allowed <= CALLS[name].keys() | COVERED, allowed - CALLS[name].keys() - COVERED
            session = held[name] = cast.acting(role)
            session.execute("set lock_timeout = '5s'")
            session.execute("begin")
            for table, inserts in db.execute(TABLES, {"role": role}).fetchall():
                mode = "row exclusive" if inserts else "access share"
                session.execute(f"lock table {table} in {mode} mode".encode())
            for call, statement in CALLS[name].items():
                assert call in allowed
                session.execute(f"select {statement}".encode())
        yield held
    finally:
        for session in held.values():
            session.execute("rollback")


def test_maintenance_and_other_tenants_go_on(
    db: psycopg.Connection[Any], holding: dict[str, psycopg.Connection[Any]]
) -> None:
    # Far more than it takes: a wait for one of those sessions would have no end.
    db.execute("set statement_timeout = '20s'")
    for _ in range(4):
        db.execute("select pgmb.maintain()")
    # One is the position of each queue, and receives of one may be under way.
    assert kept_claims(db) <= 3
    left = "select count(*) from pgmb.{} where {}"
    assert db.execute(left.format("dedup", "key = 'old'").encode()).fetchone() == (0,)
    assert db.execute(left.format("subscription", "group_id = 'theirs'").encode()).fetchone() == (0,)
    dropped = "dropped_at is not null and stream = (select id from pgmb.stream where name = 'other')"
    assert db.execute(left.format("segment", dropped).encode()).fetchone() != (0,)
    for call in (
        "pgmb.publish('t', '1'), pgmb.publish('t', '1', stream => 'other', dedup_key => 'held')",
        "pgmb.ack(lease) from pgmb.receive('theirs')",
        "pgmb.subscribe('theirs', '{t}', stream => 'other')",
        "pgmb.create_endpoint('theirs', 'https://endpoint.example/', '{t}', stream => 'other')",
        "pgmb.create_queue('new', stream => 'other')",
        "pgmb.confirm('other', 'mine', pgmb.position('other'))",
        "pgmb.rotate('main'), pgmb.rotate('other')",
        f"pgmb.worker_heartbeat('{uuid4()}', 'host', 1, '{{theirs}}', '{{}}')",
        "count(*) from pgmb.describe_queues()",
    ):
        db.execute(f"select {call}".encode())


def test_the_steps_that_waited_end_when_the_sessions_have_ended(
    db: psycopg.Connection[Any], holding: dict[str, psycopg.Connection[Any]]
) -> None:
    db.execute("select pgmb.maintain()")
    for session in holding.values():
        session.execute("commit")
    for _ in range(3):
        db.execute("select pgmb.maintain()")
    assert db.execute("select step, error from pgmb.maintenance_failure").fetchall() == []
    assert db.execute("select from pgmb.subscription where expires_at < now()").fetchall() == []
