"""Handlers are called with topics that they declare and payloads that fit all of them, and with no others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import pgmb
from harness.waiting import until
from pgmb.testing import adrain
from tests.app.stage import settled, working

RegisterBatch = Callable[[pgmb.App, Callable[[list[pgmb.Event]], None]], str]


def as_batch(app: pgmb.App, handle: Callable[[list[pgmb.Event]], None]) -> str:
    @app.on("order.created", queue="billing", batch=50)
    def charge(events: list[pgmb.Event]) -> None:
        handle(events)

    return "billing"


def as_group(app: pgmb.App, handle: Callable[[list[pgmb.Event]], None]) -> str:
    @app.group("billing").handler("charge", ["order.created"])
    def charge(events: list[pgmb.Event]) -> None:
        handle(events)

    return "billing/charge"


def as_split_group(app: pgmb.App, handle: Callable[[list[pgmb.Event]], None]) -> str:
    def split_by(events: list[pgmb.Event]) -> list[list[pgmb.Event]]:
        handle(events)
        return [[event] for event in events]

    @app.group("billing").handler("charge", ["order.created"], split_by=split_by)
    def charge(events: list[pgmb.Event]) -> None:
        handle(events)

    return "billing/charge"


every_kind = pytest.mark.parametrize("register", [as_batch, as_group, as_split_group])


def publish_mixed(broker: pgmb.Broker) -> None:
    with broker.connection() as conn, conn.transaction():
        for number in range(4):
            broker.publish("order.created", number, conn=conn)
            broker.publish("order.refunded", number, conn=conn)


@every_kind
async def test_a_batch_leaves_topics_that_its_handler_does_not_declare_to_other_workers(
    dsn: str, register: RegisterBatch
) -> None:
    app, newer, seen = pgmb.App(dsn), pgmb.App(dsn), list[str]()
    queue = register(app, lambda events: seen.extend(event.topic for event in events))
    app.queue(queue, max_attempts=1)
    taken: list[tuple[str, int]] = []

    @newer.on("order.#", queue=queue)
    async def refund(event: pgmb.Event) -> None:
        taken.append((event.topic, event.attempt))

    async with working(app) as broker:
        await broker.bind(queue, ["order.#"])
        await asyncio.to_thread(publish_mixed_to, dsn)
        await until(lambda: waiting_unhandled(broker, queue, 4))
        assert set(seen) == {"order.created"}
    async with working(newer) as broker:
        await until(lambda: settled(broker, queue))
        assert await broker.dead_letters(queue) == []
    assert taken == [("order.refunded", 1)] * 4


def publish_mixed_to(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        publish_mixed(broker)


async def waiting_unhandled(broker: pgmb.AsyncBroker, queue: str, count: int) -> bool:
    (status,) = [one for one in await broker.queue_status() if one.queue == queue]
    # A released event of an ordered queue waits, that of another queue is a retry.
    return status.waiting + status.retries == count and not status.leases


@every_kind
def test_a_batch_handled_by_hand_leaves_undeclared_topics(dsn: str, register: RegisterBatch) -> None:
    app, seen = pgmb.App(dsn), list[str]()
    queue = register(app, lambda events: seen.extend(event.topic for event in events))
    app.handle(queue)
    with pgmb.connect(dsn) as broker:
        broker.bind(queue, ["order.#"])
        publish_mixed(broker)
        assert app.handle(queue, max=8) == 8
        assert set(seen) == {"order.created"}
        (status,) = [one for one in broker.queue_status() if one.queue == queue]
        assert (status.retries, status.leases, status.dead) == (4, 0, 0)


@every_kind
async def test_drained_batches_release_undeclared_topics(dsn: str, register: RegisterBatch) -> None:
    app, seen = pgmb.App(dsn), list[str]()
    queue = register(app, lambda events: seen.extend(event.topic for event in events))
    await app.ahandle(queue)
    async with await pgmb.aconnect(dsn) as broker:
        await broker.bind(queue, ["order.#"])
    await asyncio.to_thread(publish_mixed_to, dsn)
    drained = await adrain(app)
    assert set(seen) == {"order.created"}
    assert (drained.handled, drained.released, drained.buried) == (4, 4, 0)
    await app.aclose()


@pytest.mark.parametrize("by_hand", [False, True])
async def test_in_an_ordered_queue_a_batch_ends_before_an_event_that_waits_for_another_worker(
    dsn: str, by_hand: bool
) -> None:
    app, newer, seen = pgmb.App(dsn), pgmb.App(dsn), list[Any]()
    app.queue("q", ordered=True)
    newer.queue("q", ordered=True)

    @app.on("a", queue="q", batch=10)
    async def old(payloads: list[int]) -> None:
        seen.extend(payloads)

    @newer.on("#", queue="q")
    async def new(event: pgmb.Delivery[Any]) -> None:
        seen.append(f"{event.payload} {event.attempt}")

    await app.ahandle("q")
    async with await pgmb.aconnect(dsn) as broker:
        await broker.bind("q", ["#"])
        async with broker.connection() as conn, conn.transaction():
            for topic, payload in [("a", 1), ("b", 2), ("a", 3)]:
                await broker.publish(topic, payload, key="one", conn=conn)
            await broker.publish("a", 4, key="other", conn=conn)
        if by_hand:
            assert await app.ahandle("q", 10) == 4
            assert await waiting_unhandled(broker, "q", 2)
        else:
            async with working(app):
                await until(lambda: waiting_unhandled(broker, "q", 2))
        assert sorted(seen) == [1, 4]
    await app.aclose()
    async with working(newer) as broker:
        await until(lambda: settled(broker, "q"))
    assert seen[2:] == ["2 1", "3 1"]


@dataclasses.dataclass
class Old:
    cents: int


@dataclasses.dataclass
class New:
    euros: str


@pytest.mark.parametrize("shape", [Old, pgmb.Delivery[Old]])
async def test_of_several_handlers_none_runs_while_the_payload_does_not_fit_one(
    dsn: str, caplog: pytest.LogCaptureFixture, shape: Any
) -> None:
    old, newer, seen = pgmb.App(dsn), pgmb.App(dsn), list[str]()

    @old.on("order.created", queue="billing")
    async def charge(event: pgmb.Delivery) -> None:
        seen.append("old charge")

    def mail(order: Any) -> None:
        seen.append("old mail")

    mail.__annotations__["order"] = shape
    old.on("order.#", queue="billing")(mail)

    @newer.on("order.#", queue="billing")
    async def new_mail(order: New) -> None:
        seen.append("new mail")

    async with working(newer):
        pass
    async with working(old) as broker:
        await broker.publish("order.created", {"euros": "1.20"})
        # Released and received again, twice.
        await until(lambda: caplog.text.count("payload does not fit Old") >= 2)
        assert seen == []
        await broker.publish("order.created", {"cents": 120})
        await until(lambda: len(seen) == 2)
        assert seen == ["old charge", "old mail"]
    async with working(newer) as broker:
        await until(lambda: settled(broker, "billing"))
    assert seen[2:] == ["new mail"]


async def test_a_handler_of_typed_deliveries_does_not_begin_with_a_payload_that_does_not_fit(
    dsn: str,
) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("a", queue="single")
    async def single(event: pgmb.Delivery[Old]) -> None:
        seen.append(f"single {event.key}")

    @app.on("a", queue="batch", batch=10)
    async def batch(events: list[pgmb.Delivery[Old]]) -> None:
        seen.extend(f"batch {event.payload.cents}" for event in events)

    async with working(app) as broker:
        async with broker.connection() as conn, conn.transaction():
            await broker.publish("a", {"cents": 1}, key="fits", conn=conn)
            await broker.publish("a", {"euros": "2"}, key="does not", conn=conn)
        for queue in ("single", "batch"):
            await until(partial(settled, broker, queue))
            (letter,) = await broker.dead_letters(queue)
            assert letter.event.key == "does not"
    assert sorted(seen) == ["batch 1", "single fits"]
