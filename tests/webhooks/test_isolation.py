"""Endpoints do not wait for each other, and a dispatcher starts nothing that others may have started."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections import Counter
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from harness.receiver import Exchange
from harness.states import deliveries_waiting
from pgmb.webhooks.egress import Guard
from tests.webhooks.stepped import SteppedDispatcher

pytestmark = pytest.mark.once()


async def test_a_failure_is_retried_while_another_endpoint_has_not_answered(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    released = asyncio.Event()
    failed: Counter[str] = Counter()

    async def answer(exchange: Exchange) -> int:
        path = exchange.request.path
        if path == "/slow":
            await released.wait()
            return 204
        failed[path] += 1
        return 500 if failed[path] <= 2 else 204

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint("slow", timeout="10 min")
        for name in ("one", "two"):
            stepped.endpoint(name, retry_after=["10 ms"] * 5)
        stepped.publish()
        await stepped.until(lambda: failed == {"/one": 3, "/two": 3})
        assert [request.path for request in stepped.receiver.requests].count("/slow") == 1
        released.set()
        await stepped.play()
        assert Counter(request.path for request in stepped.receiver.requests) == {
            "/slow": 1,
            "/one": 3,
            "/two": 3,
        }


async def test_a_slow_endpoint_holds_one_delivery_more_than_it_has_in_flight(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    released = asyncio.Event()

    async def answer(exchange: Exchange) -> int:
        if exchange.request.path == "/slow":
            await released.wait()
        return 204

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint("slow", timeout="10 min", max_in_flight=2)
        stepped.endpoint("fast")
        stepped.publish(100)
        await stepped.until(lambda: deliveries_waiting(db, leased=False) == 97)
        assert Counter(request.path for request in stepped.receiver.requests) == {"/slow": 2, "/fast": 100}
        released.set()
        await stepped.play()
        assert Counter(request.path for request in stepped.receiver.requests) == {"/slow": 100, "/fast": 100}


async def test_what_the_dispatcher_lacks_costs_endpoints_no_attempt(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 30
    connect = Guard.socket_factory

    def lacking(guard: Guard, *given: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return connect(guard, *given)

    monkeypatch.setattr(Guard, "socket_factory", lacking)
    async with SteppedDispatcher(dsn, db) as stepped:
        stepped.endpoint()
        stepped.endpoint("ordered", ordered=True)
        stepped.publish(20)
        for _ in range(8):
            await stepped.play()
            stepped.advance(2)
        requests = stepped.receiver.requests
        assert Counter(request.path for request in requests) == {"/e": 20, "/ordered": 20}
        assert {request.headers["pgmb-attempt"] for request in requests} == {"1"}
        assert stepped.value("select sum(failed) from pgmb.endpoints") == 0
        assert stepped.value("select count(*) from pgmb.attempt") == 0


@pytest.mark.parametrize("headers", ['{"x-tab": "a\\tb"}', '{"accept-encoding": "br"}'])
async def test_headers_that_cannot_be_sent_stop_their_endpoint_alone(
    dsn: str, db: psycopg.Connection[Any], headers: str
) -> None:
    async with SteppedDispatcher(dsn, db) as stepped:
        stepped.endpoint("bad", headers=headers)
        stepped.endpoint("good")
        stepped.publish(3)
        assert await stepped.play() == 3
        assert {request.path for request in stepped.receiver.requests} == {"/good"}
        db.execute("select pgmb.alter_endpoint('bad', headers => '{}')")
        assert await stepped.play() == 3


class Gate:
    """Answers wait until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> int:
        await self.opened.wait()
        return 204


async def test_no_request_starts_without_a_recent_heartbeat(dsn: str, db: psycopg.Connection[Any]) -> None:
    """The process cannot reach the database, or stood still. Its loop may wait for a statement meanwhile."""
    gate = Gate()
    async with SteppedDispatcher(dsn, db, gate) as stepped:
        stepped.endpoint(max_in_flight=2)
        stepped.publish(6)
        await stepped.until(lambda: len(stepped.receiver.requests) == 2)
        stepped.now += 11
        gate.opened.set()
        await asyncio.sleep(0.2)
        assert len(stepped.receiver.requests) == 2
        await stepped.play()
        bodies = [json.loads(request.body) for request in stepped.receiver.requests]
        assert sorted(bodies) == [1, 2, 3, 4, 5, 6]


async def test_nothing_is_posted_under_a_lease_that_may_have_expired(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    gate = Gate()
    async with SteppedDispatcher(dsn, db, gate, lease_for=4.0) as stepped:
        stepped.endpoint(max_in_flight=2)
        stepped.publish(6)
        await stepped.until(lambda: len(stepped.receiver.requests) == 2)
        stepped.now += 5
        gate.opened.set()
        await asyncio.sleep(0.2)
        assert len(stepped.receiver.requests) == 2
        await stepped.play()
        assert len({request.body for request in stepped.receiver.requests}) == 6


async def test_a_dispatcher_that_was_taken_for_dead_joins_again_as_a_new_one(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """The others have its share until they see its heartbeat."""
    async with SteppedDispatcher(dsn, db) as stepped:
        stepped.endpoint(max_in_flight=2)
        await stepped.turn()
        stepped.now += 11
        db.execute("select pgmb.heartbeat(%s, 'host', 1)", [uuid4()])
        stepped.publish(6)
        for _ in range(3):
            await stepped.turn()
            await asyncio.sleep(0.02)
        assert stepped.receiver.requests == []
        stepped.now += 4
        await stepped.until(lambda: stepped.receiver.requests)
