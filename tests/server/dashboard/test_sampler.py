"""One look for all who watch: as often as somebody does, remembered for a while, and told curves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from pgmb import AsyncBroker, NewEvent, aconnect
from pgmb.server.dashboard import curves
from pgmb.server.dashboard.curves import CurveCache, Scope
from pgmb.server.dashboard.sampler import Sampler
from tests.server.dashboard.visitor import visiting


@pytest_asyncio.fixture
async def broker(dsn: str) -> AsyncGenerator[AsyncBroker]:
    async with await aconnect(dsn, max_size=3) as made:
        yield made


async def test_many_who_ask_at_once_cost_one_look(broker: AsyncBroker) -> None:
    sampler = Sampler(broker, watched=60)
    samples = await asyncio.gather(*(sampler.latest() for _ in range(50)))
    assert {sample.number for sample in samples} == {1}
    sampler.outdate()
    assert (await sampler.latest()).number == 2


async def test_rates_are_what_happened_between_two_looks(broker: AsyncBroker) -> None:
    await broker.create_queue("q")
    sampler = Sampler(broker)
    before = await sampler.latest(0)
    await broker.publish_many([NewEvent("t", n) for n in range(50)])
    after = await sampler.latest(0)
    assert after.published["main"] * (after.at - before.at) == pytest.approx(50)
    assert before.published == {"main": 0.0}
    assert after.totals["waiting"] == 50
    assert after.marks["queues"] != before.marks["queues"]
    assert after.marks["dead"] == before.marks["dead"]
    drawn = curves.draw_curves(list(sampler.samples), Scope())
    assert drawn["waiting"] == {"q": [0.0, 50.0]}
    assert curves.last_values(curves.of_queue(list(sampler.samples), "q"))["waiting"]["waiting"] == 50
    assert curves.of_queue(list(sampler.samples), "gone")["received"] == {"received": [None, None]}


async def test_what_is_old_is_forgotten(broker: AsyncBroker) -> None:
    sampler = Sampler(broker, kept=0.0)
    for _ in range(5):
        await sampler.latest(0)
    assert len(sampler.samples) == 1


async def test_while_somebody_watches_samples_come_by_themselves(broker: AsyncBroker) -> None:
    sampler = Sampler(broker, watched=0.02, unwatched=3600)
    sampler.start()
    with sampler.watching():
        first = await sampler.latest()
        async for sample in sampler.following(first.number, 60):
            if sample is not None and sample.number >= first.number + 3:
                break
    sampler.leave()
    assert [sample async for sample in sampler.following(0, 60)] == []
    await sampler.close()


async def test_curves_are_few_and_the_largest(broker: AsyncBroker) -> None:
    for number in range(10):
        await broker.create_queue(f"q{number}", [f"t{number}" if number else "#"])
    sampler = Sampler(broker)
    await broker.publish("t3", 1)
    await sampler.latest(0)
    assert len(curves.draw_curves(list(sampler.samples), Scope())["waiting"]) == 6


async def test_endpoints_have_their_rates(broker: AsyncBroker) -> None:
    for name in ("a", "*"):
        await broker.create_endpoint(name, "https://a.example/", secret=None)
    sampler, done = (
        Sampler(broker),
        "update pgmb.endpoint_activity set delivered = delivered + 8, failed = 2,",
    )
    drawn = CurveCache(sampler)
    for _ in range(2):
        async with broker.connection() as connection:
            await connection.execute(f"{done} delivered_at = clock_timestamp()".encode())
        await sampler.latest(0)
    sample = sampler.samples[-1]
    passed = sample.at - sampler.samples[0].at
    assert sample.busy["*"].delivered * passed == pytest.approx(8)
    assert sample.posted.delivered * passed == pytest.approx(16)
    assert sample.posted.failed == 0
    together = drawn.of(Scope(endpoints=True))["posted"]["delivered"][-1]
    one = drawn.of(Scope(endpoint="*"))["posted"]["delivered"][-1]
    assert together is not None
    assert one is not None
    assert together > one > 0
    assert drawn.of(Scope(endpoint="gone"))["posted"]["failed"] == [0.0, 0.0]


async def test_live_tells_history_then_samples_and_ends_with_the_session(dsn: str) -> None:
    async with visiting(dsn, "inspect") as visitor:
        messages: list[bytes] = []
        told = asyncio.Event()
        transport: Any = visitor.client._transport

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                assert headers[b"content-type"].startswith(b"text/event-stream")
                assert b"no-transform" in headers[b"cache-control"]
            else:
                messages.append(message.get("body", b""))
                if sum(b"event: sample" in one for one in messages) >= 1:
                    told.set()

        cookie = "; ".join(f"{one.name}={one.value}" for one in visitor.client.cookies.jar)
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/ui/live",
            "raw_path": b"/ui/live",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("pgmb.test", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"pgmb.test"), (b"cookie", cookie.encode())],
        }
        live = asyncio.create_task(transport.app(scope, receive, send))
        await asyncio.wait_for(told.wait(), 60)
        history = next(one for one in messages if b"event: history" in one)
        document = msgspec.json.decode(history.partition(b"data: ")[2])
        assert set(document) == {"at", "curves", "marks", "badges"}
        assert len(document["at"]) == len(document["curves"]["published"]["main"])
        await visitor.send("/ui/logout")
        await asyncio.wait_for(live, 60)
