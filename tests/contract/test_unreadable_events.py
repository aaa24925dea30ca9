"""An event that the server cannot read does not stop its queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest

import pgmb
from harness.damage import damage, publish_damaged
from harness.states import age_leases, paused_queues

pytestmark = pytest.mark.new_database

Db = psycopg.Connection[Any]
SEGMENT = "pgmb.segment_1_0"


def publish_large(db: Db, topic: str = "damaged", key: str | None = None) -> None:
    """Publish an event that is stored apart, and that `damage` makes unreadable."""
    db.execute(
        "select pgmb.publish(%s, json_build_object('a', 1, 'large', string_agg(md5(n::text), '')), key => %s)"
        " from generate_series(1, 1000) n",
        [topic, key],
    )


def drain(broker: pgmb.Broker, queue: str = "q", failures: int = 3) -> list[str]:
    """Receive as workers do: an event at a time, and give up one that cannot be read `failures` times."""
    topics: list[str] = []
    failed = 0
    for _ in range(20):
        try:
            lease = broker.receive(queue, 1)
        except psycopg.errors.InternalError as error:
            failed += 1
            if broker.bury_unreadable(queue, str(error), failed) is not None:
                failed = 0
            continue
        if not lease:
            break
        topics += [event.topic for event in lease]
        lease.ack()
    return topics


def assert_buried(broker: pgmb.Broker, queue: str = "q", topic: str = "damaged", seq: int = 1) -> None:
    (dead,) = [letter for letter in broker.dead_letters(queue) if isinstance(letter.event.payload, dict)]
    assert (dead.event.seq, dead.event.topic) == (seq, topic)
    assert "chunk number" in dead.event.payload["pgmb_unreadable"]
    assert str(dead.error).startswith("cannot be read: ")


@pytest.mark.parametrize("options", ["", ", ordered => true"])
def test_an_unreadable_event_becomes_a_dead_letter_after_its_attempts(dsn: str, options: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        db.execute(f"select pgmb.create_queue('q', max_attempts => 3{options})")
        publish_damaged(db, key="k")
        db.execute("select pgmb.publish('whole', '1', key => 'k')")
        with pytest.raises(psycopg.errors.InternalError, match="chunk number"):
            broker.receive("q", 1)
        assert broker.bury_unreadable("q", "missing chunk", 2) is None
        assert broker.bury_unreadable("q", "missing chunk", 3) == 1
        (lease,) = broker.receive("q", 10)
        assert lease.topic == "whole"
        (dead,) = broker.dead_letters("q")
        assert (dead.event.seq, dead.event.topic, dead.event.key) == (1, "damaged", "k")
        assert dead.event.payload["pgmb_unreadable"] == "missing chunk"
        assert dead.error == "cannot be read: missing chunk"


def test_a_readable_event_is_given_back(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", max_attempts=1)
        broker.publish("a", 1)
        assert broker.bury_unreadable("q", "wrong", 1) is None
        (event,) = broker.receive("q")
        assert (event.payload, event.attempt) == (1, 1)
        assert broker.dead_letters("q") == []


@pytest.mark.parametrize("options", ["", ", fair_by => 'key'"])
def test_an_unreadable_event_older_than_the_ttl_becomes_a_dead_letter(dsn: str, options: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        db.execute(f"select pgmb.create_queue('q', ttl => '200 ms'{options})")
        publish_large(db)
        db.execute("select pgmb.publish('old', '1')")
        damage(db, SEGMENT)
        time.sleep(0.3)
        db.execute("select pgmb.publish('new', '1')")
        assert [event.topic for event in broker.receive("q")] == ["new"]
        assert_buried(broker)
        assert [letter.event.topic for letter in broker.dead_letters("q")].count("old") == 1


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_lease_expires_that_holds_an_unreadable_event(dsn: str, max_attempts: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q", max_attempts=max_attempts)
        publish_large(db)
        db.execute("select pgmb.publish('whole', '1')")
        broker.receive("q", 10, lease_for=0.1)
        damage(db, SEGMENT)
        time.sleep(0.2)
        db.execute("select pgmb.publish('next', '1')")
        expected = ["next"] if max_attempts == 1 else ["whole", "next"]
        assert drain(broker) == expected
        assert_buried(broker)


def retry(broker: pgmb.Broker, lease: UUID, seqs: list[int] | None) -> int:
    return broker.retry(lease, seqs, after=0)


def release(broker: pgmb.Broker, lease: UUID, seqs: list[int] | None) -> int:
    return broker.release(lease, seqs)


def bury(broker: pgmb.Broker, lease: UUID, seqs: list[int] | None) -> int:
    return broker.bury(lease, seqs)


@pytest.mark.parametrize("seqs", [None, [1, 2]])
@pytest.mark.parametrize("settle", [retry, release, bury])
def test_a_consumer_gives_back_an_unreadable_event(
    dsn: str, settle: Callable[[pgmb.Broker, UUID, list[int] | None], int], seqs: list[int] | None
) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q")
        publish_large(db)
        db.execute("select pgmb.publish('whole', '1')")
        lease = broker.receive("q", 10)
        assert lease.id is not None
        damage(db, SEGMENT)
        assert settle(broker, lease.id, seqs) == 2
        assert drain(broker) == ([] if settle is bury else ["whole"])
        assert_buried(broker)


def test_an_unreadable_event_is_parked_behind_its_key_as_a_dead_letter(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q", ordered=True, shards=1)
        db.execute("select pgmb.publish('first', '1', key => 'k')")
        held = broker.receive("q", 1)
        # A receive reads nothing behind a lease that was just given.
        time.sleep(0.15)
        publish_large(db, key="k")
        damage(db, SEGMENT)
        db.execute("select pgmb.publish('behind', '1', key => 'k')")
        db.execute("select pgmb.publish('other', '1', key => 'free')")
        assert [event.topic for event in broker.receive("q", 10)] == ["other"]
        assert_buried(broker, seq=2)
        held.ack()
        assert [event.topic for event in broker.receive("q", 10)] == ["behind"]


def test_a_queue_with_an_unreadable_event_is_converted(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q", ordered=True)
        publish_large(db, key="k")
        db.execute("select pgmb.publish('whole', '1', key => 'k')")
        damage(db, SEGMENT)
        broker.convert_queue("q")
        assert_buried(broker)
        assert drain(broker) == ["whole"]


def test_unreadable_retries_become_dead_letters_with_their_last_attempt(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q", max_attempts=2)
        publish_large(db)
        db.execute("select pgmb.publish('whole', '1')")
        broker.receive("q", 10).retry(after=0)
        lease = broker.receive("q", 10)
        assert len(lease.events) == 2
        damage(db, "pgmb.retry")
        lease.retry()
        assert_buried(broker)
        assert {letter.event.topic for letter in broker.dead_letters("q")} == {"damaged", "whole"}


def test_redrive_leaves_an_unreadable_dead_letter_and_moves_the_others(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q")
        publish_large(db)
        db.execute("select pgmb.publish('whole', '1')")
        broker.receive("q", 10).bury()
        damage(db, "pgmb.dead")
        assert broker.redrive("q") == 1
        assert drain(broker) == ["whole"]
        assert db.execute("select topic from pgmb.dead").fetchall() == [("damaged",)]


@pytest.mark.parametrize(
    "asked",
    [
        "filter => '$.payload.a == 1'",
        "filter => '$.payload.a == 1 || $.topic == \"x\"'",
        """equals => '{"payload": {"a": 1}}'""",
    ],
)
def test_a_filtered_queue_does_not_pass_over_an_unreadable_event(dsn: str, asked: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        db.execute(f"select pgmb.create_queue('q', max_attempts => 3, {asked})")
        db.execute("""select pgmb.publish('before', '{"a": 1}')""")
        publish_large(db)
        damage(db, SEGMENT)
        db.execute("""select pgmb.publish('after', '{"a": 1}')""")
        db.execute("""select pgmb.publish('other', '{"a": 2}')""")
        assert drain(broker) == ["before", "after"]
        assert_buried(broker, seq=2)
        assert paused_queues(db) == {}


def test_maintenance_and_status_go_on_beside_an_unreadable_event(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db, pgmb.connect(dsn) as broker:
        broker.create_queue("q", filter="$.payload.a == 1")
        publish_large(db)
        damage(db, SEGMENT)
        db.execute("select pgmb.publish('whole', '1') from generate_series(1, 1100)")
        age_leases(db)
        assert db.execute("select pgmb.maintain()").fetchone() is not None
        assert db.execute("select * from pgmb.maintenance_failure").fetchall() == []
        assert len(db.execute("select * from pgmb.describe_queues()").fetchall()) == 1
        assert len(db.execute("select * from pgmb.queue_health()").fetchall()) == 1
        row = db.execute(
            "select pgmb.event_fate(pgmb.derive_id(e.seq, e.published_at, s.salt))"
            " from pgmb.log_main e, pgmb.stream s where e.seq = 1 and s.name = 'main'"
        ).fetchone()
        assert row is not None
