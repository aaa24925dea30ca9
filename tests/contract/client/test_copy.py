"""Many events are copied: the same events, the same promises."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import msgspec
import psycopg
import pytest

import pgmb
from pgmb import NewEvent
from pgmb._core import batch


def received(broker: pgmb.Broker) -> list[tuple[object, ...]]:
    return [
        (event.topic, event.key, event.raw, event.headers, event.stream)
        for event in broker.receive("q", 100_000)
    ]


def various(number: int) -> list[NewEvent]:
    return [
        NewEvent(
            f"a.{index % 7}",
            {"n": index, "text": "\0\n\\\t'é"},
            key=None if index % 3 else f"k{index}",
            headers=None if index % 2 else {"h": index},
            id=None if index % 5 else UUID(int=index),
        )
        for index in range(number)
    ]


def test_copied_events_are_those_that_arrays_carry(
    broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_queue("q")
    events = various(100)
    assert broker.publish_many(events) == 100
    by_arrays = received(broker)
    monkeypatch.setattr(batch, "BLOCK_EVENTS", 7)
    plan = batch.plan(events, None, None, "main")
    assert isinstance(plan, batch.Parts)
    assert isinstance(next(plan.steps), batch.Copy)
    assert broker.publish_many(events) == 100
    assert received(broker) == by_arrays


def test_copied_payloads_are_those_that_arrays_carry(
    broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_queue("q")
    payloads = [msgspec.Raw(b'{"a":\n 1}'), "\n", None, {"é": "\0"}] * 5
    for headers in (None, {"h": 1}):
        assert broker.publish_many("t", payloads, headers=headers) == 20
        by_arrays = received(broker)
        assert by_arrays[0][2] == b'{"a":\n 1}'
        with monkeypatch.context() as patched:
            patched.setattr(batch, "BLOCK_EVENTS", 3)
            assert broker.publish_many("t", payloads, headers=headers) == 20
        assert received(broker) == by_arrays


@pytest.mark.parametrize(
    "number", [batch.BLOCK_EVENTS - 1, batch.BLOCK_EVENTS, batch.BLOCK_EVENTS + 1, 3 * batch.BLOCK_EVENTS]
)
def test_any_number_arrives_once_and_in_order(broker: pgmb.Broker, number: int) -> None:
    broker.create_queue("q")
    assert broker.publish_many("t", (n for n in range(number))) == number
    assert [int(row[2]) for row in received(broker)] == list(range(number))  # type: ignore[call-overload]


def test_a_failing_source_publishes_nothing(broker: pgmb.Broker) -> None:
    broker.create_queue("q")

    def failing() -> Iterator[int]:
        yield from range(batch.BLOCK_EVENTS * 2)
        raise KeyError("the source is exhausted early")

    with pytest.raises(KeyError):
        broker.publish_many("t", failing())
    assert not broker.receive("q")
    assert broker.publish_many("t", [1]) == 1


def test_a_publisher_may_copy(broker: pgmb.Broker, db: psycopg.Connection[object], dsn: str) -> None:
    broker.create_queue("q")
    db.execute(f"create role copier_{db.info.backend_pid} login in role pgmb_publisher")
    try:
        with pgmb.connect(dsn, user=f"copier_{db.info.backend_pid}") as publisher:
            assert publisher.publish_many("t", range(5000)) == 5000
            assert publisher.publish_many("t", range(5)) == 5
            assert publisher.publish("t", 1).version == 7
            with pytest.raises(pgmb.PermissionDenied):
                publisher.receive("q")
    finally:
        db.execute(f"drop role copier_{db.info.backend_pid}")
    assert len(broker.receive("q", 10_000)) == 5006
