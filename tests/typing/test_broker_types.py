"""What type checkers see. mypy and pyright check this file; nothing here runs against a database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_type
from uuid import UUID

import psycopg

import pgmb

if TYPE_CHECKING:

    def synchronous(broker: pgmb.Broker, conn: psycopg.Connection[Any], at: datetime) -> None:
        assert_type(pgmb.connect(""), pgmb.Broker)
        assert_type(broker.publish("a", {"b": 1}, delay=timedelta(hours=1), conn=conn), UUID)
        assert_type(broker.publish("a", 1, delay=1.5, at=at), UUID)
        assert_type(broker.publish_many("a", [1, 2]), int)
        assert_type(broker.publish_many([pgmb.NewEvent("a", 1)], conn=conn), int)
        lease = broker.receive("q", 10, lease_for=5)
        assert_type(lease, pgmb.Lease)
        assert_type(broker.receive("q", ack=lease), pgmb.Lease)
        assert_type(iter(lease), Iterator[pgmb.Event])
        assert_type(lease.ack(lease.events[0]), int)
        assert_type(lease.retry(lease.events, after=1), int)
        assert_type(lease.extend(), datetime)
        assert_type(lease.events[0].id, UUID)
        assert_type(lease.events[0].raw, bytes)
        assert_type(broker.position(), pgmb.Position)
        assert_type(broker.dead_letters("q"), list[pgmb.DeadLetter])
        assert_type(broker.queue_status(), list[pgmb.QueueStatus])
        with broker.connection() as own:
            assert_type(own, psycopg.Connection[Any])

    async def asynchronous(broker: pgmb.AsyncBroker, conn: psycopg.AsyncConnection[Any]) -> None:
        assert_type(await pgmb.aconnect(""), pgmb.AsyncBroker)
        assert_type(await broker.publish("a", 1, conn=conn), UUID)
        assert_type(await broker.publish_many("a", (n for n in range(3))), int)
        lease = await broker.receive("q")
        assert_type(lease, pgmb.AsyncLease)
        assert_type(await lease.ack(), int)

    def refused(broker: pgmb.Broker, conn: psycopg.AsyncConnection[Any], event: pgmb.Event) -> None:
        broker.publish("a", 1, conn=conn)  # type: ignore[arg-type]
        broker.receive("q", ack=event)  # type: ignore[arg-type]
        broker.publish_many("a", [1], key="k")  # type: ignore[call-overload]
        event.seq = 2  # type: ignore[misc]


def test_the_package_is_marked_as_typed() -> None:
    from importlib.resources import files

    assert (files("pgmb") / "py.typed").is_file()
