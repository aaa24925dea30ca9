"""What type checkers see of tails, consumers and the test helpers. Nothing here runs against a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import pgmb

if TYPE_CHECKING:
    from pgmb.testing import Drained, FrozenClock, assert_published, drain

    def synchronous(broker: pgmb.Broker, app: pgmb.App, clock: FrozenClock) -> None:
        tail = broker.tail("a.*", after=broker.earliest(), max_wait=1.5)
        for event in tail:
            assert_type(event, pgmb.Event)
        for lease in broker.consume("q", lease_for=5):
            assert_type(lease, pgmb.Lease)
        assert_type(broker.listener().subscribe("main").wait(1), bool)
        assert_type(drain(app), Drained)
        assert_type(assert_published(broker, "a", {"b": 1}, count=1), list[pgmb.Event])
        broker.tail(after=tail.position)

    async def asynchronous(broker: pgmb.AsyncBroker) -> None:
        async with broker.tail("a.*") as tail:
            async for event in tail:
                assert_type(event, pgmb.Event)
        async for lease in broker.consume("q"):
            assert_type(lease, pgmb.AsyncLease)
        assert_type(await broker.listener().subscribe().wait(), bool)

    def refused(broker: pgmb.Broker, conn: Any) -> None:
        broker.tail(1)  # type: ignore[arg-type]
        broker.consume(queue=b"q")  # type: ignore[arg-type]


def test_what_is_checked_above_is_there() -> None:
    assert {"tail", "consume", "listener"} <= set(dir(pgmb.AsyncBroker))
