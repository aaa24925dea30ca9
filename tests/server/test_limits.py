"""How much one may ask for: a rate for each key, and for an address without one; bodies of a size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from starlette.requests import Request

from harness.states import lock_queues
from pgmb.server import create_app, database
from pgmb.server.limits import FairTurns, Limits, Places, Rates, read_body
from pgmb.server.problems import Problem
from tests.server.asking import asking, bearer, make_key
from tests.server.rest.api import opened, problem


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.once
def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    rates = Rates(2, 5, clock=clock)
    for _ in range(5):
        rates.take("a")
    with pytest.raises(Problem) as refused:
        rates.take("a")
    assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
    assert refused.value.headers["Retry-After"] == "1"
    rates.take("b")
    clock.now += 0.5
    rates.take("a")
    with pytest.raises(Problem):
        rates.take("a")
    clock.now += 1000
    for _ in range(5):
        rates.take("a")
    with pytest.raises(Problem):
        rates.take("a")


@pytest.mark.once
def test_buckets_do_not_grow_without_bound() -> None:
    rates = Rates(1, 1, most=10)
    for number in range(1000):
        rates.take(number)
    assert len(rates._buckets) == 10  # pyright: ignore[reportPrivateUsage]


async def test_each_key_has_a_rate_of_its_own_and_so_has_an_address(dsn: str) -> None:
    async with opened(dsn, Limits(requests_per_second=0.001, burst=3)) as api:
        other = api.make_key("other", "inspect")
        for key in (api.key, other, None):
            statuses = [(await api.ask("GET", "/v1/queues", key=key)).status_code for _ in range(3)]
            assert statuses == [401 if key is None else 200] * 3
            answer = await api.ask("GET", "/v1/queues", key=key)
            assert problem(answer) == (429, "too_many_requests")
            assert int(answer.headers["retry-after"]) >= 1


def arriving(*parts: bytes, declared: str | None = None) -> Request:
    headers = [] if declared is None else [(b"content-length", declared.encode())]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


@pytest.mark.once
async def test_no_more_of_a_body_is_read_than_it_may_have() -> None:
    assert await read_body(arriving(b"ab", b"c"), 3) == b"abc"
    for request in (
        arriving(b"ab", b"cd"),
        arriving(b"", declared="4"),
        arriving(b"", declared="9" * 10_000),
        arriving(*[b"x"] * 1000, declared="nonsense"),
    ):
        with pytest.raises(Problem) as refused:
            await read_body(request, 3)
        assert refused.value.status == 413


async def test_an_endless_body_is_cut_off(dsn: str) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 1000

    async with opened(dsn, Limits(body=10_000)) as api:
        headers = {"Content-Type": "application/json"}
        answer = await api.ask("POST", "/v1/queues", content=endless(), headers=headers)
        assert problem(answer) == (413, "too_large")
        assert sent <= 12


@pytest.mark.parametrize(
    "path", ["/v1/queues", "/v1/openapi.json", "/v1/streams/main/events", "/ui", "/ui/login", "/metrics"]
)
@pytest.mark.parametrize("credential", [None, "pgmb_key_unknown", "no key at all"])
async def test_requests_without_a_key_are_counted_before_anything_is_looked_up(
    dsn: str, monkeypatch: pytest.MonkeyPatch, path: str, credential: str | None
) -> None:
    lookups = 0
    rows = database.rows

    async def counted(*given: Any, **named: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return await rows(*given, **named)

    monkeypatch.setattr("pgmb.server.access.rows", counted)
    limits = Limits(requests_per_second=0.001, burst=3)
    app = create_app(dsn, limits=limits)
    async with asking(app) as client:
        key = make_key(dsn, "k", "operate")
        # Known from here on: it needs the address no more.
        assert (await client.get("/v1/queues", headers=bearer(key))).status_code == 200
        lookups = 0
        refused = 0
        for number in range(8):
            given = {} if credential is None else bearer(f"{credential}{number}")
            answer = await client.get(path, headers=given)
            refused += answer.status_code == 429 or answer.text.startswith("retry: ")
        assert refused == 5
        assert lookups <= 3
        assert (await client.get("/v1/queues", headers=bearer(key))).status_code == 200
        assert (await client.get("/livez")).status_code == 200


async def test_a_key_that_is_valid_costs_its_address_nothing(dsn: str) -> None:
    app = create_app(dsn, limits=Limits(requests_per_second=0.001, burst=3))
    async with asking(app) as client:
        for number in range(6):
            key = make_key(dsn, f"k{number}", "operate")
            for _ in range(2):
                assert (await client.get("/v1/queues", headers=bearer(key))).status_code == 200


def test_places_are_shared_and_none_takes_all() -> None:
    places, stack = Places(100), ExitStack()

    def takes(who: str) -> int:
        taken = 0
        while places.free(who):
            stack.enter_context(places.holding(who))
            taken += 1
        return taken

    assert takes("greedy") == 90
    assert [takes("a"), takes("b"), takes("c")] == [5, 3, 2]
    stack.close()
    assert takes("greedy") == 90
    for other in range(10):
        assert places.free(other)
        stack.enter_context(places.holding(other))
        assert not places.free("greedy")
    assert not places.free("late")


@pytest.mark.parametrize("number", [0, 1, 5])
def test_few_places_are_all_used(number: int) -> None:
    places, stack = Places(number), ExitStack()
    for _ in range(number):
        assert places.free("a")
        stack.enter_context(places.holding("a"))
    assert not places.free("a")


async def test_clients_that_wait_get_turns_in_rotation() -> None:
    turns, order = FairTurns(1, most_waiting=3), list[str]()

    async def take(who: str) -> None:
        async with turns.turn(who):
            order.append(who)
            await asyncio.sleep(0)

    async with turns.turn("first"):
        waiting = [asyncio.create_task(take(who)) for who in ("a", "a", "a", "b", "c", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            await take("a")
        assert refused.value.status == 429
        waiting[1].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["a", "b", "c", "b", "a"] or order == ["a", "b", "c", "a", "b"]
    async with asyncio.timeout(1):
        await take("d")


LOCKED = (
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


async def test_readings_of_one_key_leave_connections_to_others(
    dsn: str, connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    blocking = connect()
    blocking.execute("begin")
    lock_queues(blocking)
    async with opened(dsn, max_size=4) as api:
        greedy, other = api.make_key("greedy", "consume:*"), api.make_key("other", "publish:main")
        event = f"/v1/events/{uuid4()}"
        reading = [asyncio.create_task(api.ask("GET", event, key=greedy)) for _ in range(20)]
        try:
            watching = connect()
            while watching.execute(LOCKED).fetchone() < (2,):  # type: ignore[operator]  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            async with asyncio.timeout(5):
                for number in range(20):
                    body = {"topic": "t", "payload": number}
                    answer = await api.ask("POST", "/v1/streams/main/events", key=other, json=body)
                    assert answer.status_code == 200
            assert not any(task.done() for task in reading)
        finally:
            blocking.execute("rollback")
            answers = await asyncio.gather(*reading)
        assert {answer.status_code for answer in answers} <= {200, 404}
