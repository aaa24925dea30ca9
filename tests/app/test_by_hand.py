"""A queue handled by hand: so many events, here and now, settled as a worker would."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import pgmb


def test_it_handles_so_many_and_says_how_many(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()
    app.on("a.*", queue="q")(seen.append)
    app.handle("q")  # creates the queue
    with pgmb.connect(dsn) as broker:
        broker.publish_many("a.b", range(5))
        assert app.handle("q") == 1
        assert app.handle("q", max=3) == 3
        assert app.handle("q", max=100) == 1
        assert app.handle("q") == 0
        assert seen == [0, 1, 2, 3, 4]
        assert broker.queue_depth("q") == 0


def test_failures_are_settled_as_by_a_worker(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    app, seen = pgmb.App(dsn), list[tuple[int, int]]()

    @app.on("a", queue="q", retry=0, max_attempts=2)
    def handle(event: pgmb.Delivery[int]) -> None:
        seen.append((event.payload, event.attempt))
        if event.payload == 2:
            raise pgmb.Reject("never")
        if event.payload == 1:
            raise ValueError("not now")

    app.handle("q")
    with pgmb.connect(dsn) as broker:
        broker.publish_many("a", [1, 2, 3])
        handled = 0
        while handled < 4:
            handled += app.handle("q", max=10)
        letters = broker.dead_letters("q")
    assert sorted(seen) == [(1, 1), (1, 2), (2, 1), (3, 1)]
    assert {(letter.event.payload, letter.error) for letter in letters} == {
        (1, "ValueError: not now"),
        (2, "never"),
    }
    assert "ValueError: not now" in caplog.text


def test_an_ordered_queue_keeps_its_order(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()
    app.queue("q", ordered=True)

    @app.on("a", queue="q", retry=3600)
    def handle(event: pgmb.Delivery[int]) -> None:
        seen.append(event.payload)
        if event.payload == 1:
            raise ValueError

    app.handle("q")
    with pgmb.connect(dsn) as broker:
        for number in (1, 2):
            broker.publish("a", number, key="one")
        broker.publish("a", 3, key="other")
        while app.handle("q", max=10):
            pass
    assert sorted(seen) == [1, 3]


def test_a_batch_handler_gets_at_most_so_many(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[list[int]]()

    @app.on("a", queue="q", batch=3)
    def handle(numbers: list[int]) -> None:
        seen.append(numbers)

    app.handle("q")
    with pgmb.connect(dsn) as broker:
        broker.publish_many("a", range(5))
        assert app.handle("q", max=4) == 4
        assert app.handle("q", max=4) == 1
    assert seen == [[0, 1, 2], [3], [4]]


async def test_the_lease_is_prolonged_while_a_handler_runs(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[int]()
    app.queue("q", lease_for=timedelta(seconds=2))

    @app.on("a", queue="q")
    async def handle(event: pgmb.Delivery[int]) -> None:
        calls.append(event.attempt)
        await asyncio.sleep(4)

    await app.ahandle("q")
    await app.apublish("a", 1)
    assert await app.ahandle("q") == 1
    assert await app.ahandle("q") == 0
    assert calls == [1]
    await app.aclose()


async def test_inside_an_event_loop_it_is_awaited(dsn: str) -> None:
    app = pgmb.App(dsn)
    app.on("a", queue="q")(lambda payload: None)
    with pytest.raises(RuntimeError, match="await ahandle"):
        app.handle("q")


def test_handlers_may_publish_in_the_same_event_loop(dsn: str) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q")
    async def handle(number: int) -> None:
        if number:
            await app.apublish("a", number - 1)

    app.publish("a", 3)
    assert app.handle("q", max=10) == 4
    app.close()


@pytest.mark.parametrize("limit", [0, -1])
def test_no_events_are_not_a_number_of_events(dsn: str, limit: int) -> None:
    app = pgmb.App(dsn)
    app.on("a", queue="q")(lambda payload: None)
    with pytest.raises(pgmb.InvalidArgument, match="max must be at least 1"):
        app.handle("q", max=limit)
    with pytest.raises(pgmb.InvalidArgument, match="no handler of queue 'other'"):
        app.handle("other")
