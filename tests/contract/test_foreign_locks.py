"""Promise: a role that can connect, and do nothing else, cannot stop consumers or maintenance."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from harness.sessions import Session, Sessions
from harness.states import age_leases, kept_claims

AT_ONCE = 0.9
"""Less than the second for which a receive waits for another."""
ABOUT_A_SECOND = 4.0


@pytest.fixture
def queue(sessions: Sessions) -> Iterator[Sessions]:
    admin, stranger = sessions.open("admin", "stranger")
    admin.run("select pgmb.create_queue('q')")
    admin.run("create role stranger_to_locks")
    stranger.run("set session authorization stranger_to_locks")
    yield sessions
    stranger.close()
    admin.run("drop role stranger_to_locks")


def publish_and_settle(session: Session) -> None:
    session.run("select pgmb.publish('t', '1')")
    ((lease,),) = session.run("select lease from pgmb.receive('q')")
    assert session.value("select pgmb.ack(%s)", [lease]) == 1


def test_the_keys_of_locks_cannot_be_computed(queue: Sessions) -> None:
    consumer, admin, stranger = queue.open("consumer", "admin", "stranger")
    stranger.run(
        "select pg_advisory_lock((28749::bigint << 48) | (q::bigint << 24) | g)"
        " from generate_series(1, 3) q, generate_series(0, 5) g"
    )
    stranger.run("select pg_advisory_lock((28749::bigint << 48) - 1), pg_advisory_lock(28749, 4)")
    began = time.monotonic()
    publish_and_settle(consumer)
    assert time.monotonic() - began < AT_ONCE
    age_leases(admin.connection)
    admin.run("select pgmb.maintain()")
    assert kept_claims(admin) == 1, "maintenance clears what is settled"


def test_a_stranger_who_holds_a_key_that_it_saw_delays_others_by_a_second(queue: Sessions) -> None:
    consumer, other, admin, stranger = queue.open("consumer", "other", "admin", "stranger")
    consumer.run("select pgmb.publish('t', '1')")
    consumer.run("begin")
    ((lease,),) = consumer.run("select lease from pgmb.receive('q')")
    seen = stranger.run(
        "select (classid::bigint << 32) | objid::bigint from pg_locks where locktype = 'advisory'"
    )
    assert len(seen) == 1
    taking = stranger.start("select pg_advisory_lock(%s)", [seen[0][0]]).blocked()
    consumer.run("commit")
    taking.result()
    assert consumer.value("select pgmb.ack(%s)", [lease]) == 1, "settling takes none of these locks"
    began = time.monotonic()
    publish_and_settle(other)
    assert time.monotonic() - began < ABOUT_A_SECOND
    began = time.monotonic()
    publish_and_settle(other)
    assert time.monotonic() - began < AT_ONCE, "the next generation has another key"
    admin.run("select pgmb.maintain()")


def test_only_the_owner_reads_what_the_keys_are_made_from(queue: Sessions) -> None:
    admin = queue["admin"]
    granted = (
        "select a.grantee, c.relowner from pg_class c cross join aclexplode(c.relacl) a"
        " where c.oid = 'pgmb.lock_secret'::regclass"
    )
    assert admin.run(f"select from ({granted}) g where g.grantee <> g.relowner") == []
    assert admin.value("select octet_length(secret) from pgmb.lock_secret") == 32
