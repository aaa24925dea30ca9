"""The objects that the clients give: Event, Lease, and their asynchronous twins."""

from __future__ import annotations

import pickle
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

import pgmb
from pgmb.types import derive_id, moment


def test_an_event_decodes_its_payload_once_and_keeps_the_raw_text(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    given = broker.publish("a", msgspec.Raw(b'{"b":  1.0, "a": "\\u0000"}'), headers={"h": 1})
    (event,) = broker.receive("q")
    assert event.raw == b'{"b":  1.0, "a": "\\u0000"}'
    assert event.payload == {"b": 1.0, "a": "\0"}
    assert event.payload is event.payload
    assert (event.id, event.headers, event.stream) == (given, {"h": 1}, "main")
    assert abs(event.published_at - datetime.now(UTC)) < timedelta(minutes=1)


def test_an_event_is_frozen_hashable_and_survives_pickling(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.publish_many("a", [1, 2])
    first, second = broker.receive("q")
    copy = pickle.loads(pickle.dumps(first))
    assert copy == first
    assert copy.payload == 1
    assert {first, copy, second} == {first, second}
    assert first != second
    assert "topic='a'" in repr(first)
    with pytest.raises(AttributeError):
        first.topic = "b"  # type: ignore[misc]


def test_a_lease_is_its_events(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.publish_many("a", range(3))
    lease = broker.receive("q")
    assert lease
    assert len(lease) == 3
    assert list(lease) == lease.events
    assert isinstance(lease.id, UUID)
    assert lease.queue == "q"


def test_a_lease_settles_one_event_several_or_all(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.publish_many("a", range(5))
    lease = broker.receive("q")
    one, two, three, *_ = lease.events
    assert lease.ack(one) == 1
    assert lease.ack([]) == 0
    assert lease.bury(two, error="broken") == 1
    assert lease.retry([three], after=3600, error="later") == 1
    assert lease.extend(60) > datetime.now(UTC) + timedelta(seconds=30)
    assert lease.ack() > 0
    assert [dead.event.payload for dead in broker.dead_letters("q")] == [1]
    assert not broker.receive("q")


def test_an_empty_lease_needs_no_settling(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    empty = broker.receive("q")
    assert not empty
    assert (empty.ack(), empty.retry(), empty.bury()) == (0, 0, 0)
    broker.publish("a", 1)
    lease = broker.receive("q", ack=empty)
    assert [event.payload for event in lease] == [1]
    assert not broker.receive("q", ack=lease)


def test_events_name_the_stream_of_their_queue(broker: pgmb.Broker) -> None:
    broker.create_stream("other")
    broker.create_queue("q", stream="other")
    broker.publish("a", 1, stream="other")
    assert broker.receive("q").events[0].stream == "other"
    broker.drop_queue("q")
    broker.create_queue("q")
    broker.publish("a", 1)
    assert broker.receive("q").events[0].stream == "main"


async def test_the_asynchronous_lease_does_the_same(dsn: str) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q")
        await broker.publish_many("a", range(4))
        lease = await broker.receive("q")
        assert isinstance(lease, pgmb.AsyncLease)
        assert await lease.ack(lease.events[:1]) == 1
        assert await lease.bury(lease.events[1]) == 1
        assert await lease.retry(lease.events[2], after=3600) == 1
        await lease.extend(60)
        async with broker.connection() as conn, conn.transaction():
            assert await lease.ack(conn=conn) > 0
        assert not await broker.receive("q", ack=lease.id)


def test_ids_are_derived_here_as_in_sql(db: psycopg.Connection[Any]) -> None:
    db.execute("set timezone = 'UTC'")
    dice = random.Random(1)
    for _ in range(300):
        seq = dice.randrange(1 << 50)
        salt = dice.randrange(1 << 62)
        at = dice.randrange(600_000_000_000_000, 1_500_000_000_000_000)
        row = db.execute("select pgmb.derive_id(%s, %s, %s)", [seq, moment(at), salt]).fetchone()
        assert row == (derive_id(seq, at, salt),)


def test_status_tells_what_waits(broker: pgmb.Broker) -> None:
    broker.create_queue("q", ["a.#"])
    broker.publish_many("a", range(10))
    broker.publish_many("b", range(10))
    lease = broker.receive("q", 4)
    lease.bury(lease.events[0])
    lease.retry(lease.events[1], after=3600)
    broker.pause("q", "looking")
    (queue,) = broker.queue_status()
    assert (queue.queue, queue.stream, queue.patterns) == ("q", "main", ["a.#"])
    assert (queue.waiting, queue.leases, queue.retries, queue.dead) == (6, 1, 1, 1)
    assert queue.paused_reason == "looking"
    assert queue.paused_at is not None
    assert queue.oldest_age is not None
    # Six in the log, and the retry.
    assert broker.queue_depth("q") == 7
    (stream,) = broker.stream_status()
    assert (stream.stream, stream.events, stream.segments) == ("main", 20, 1)
