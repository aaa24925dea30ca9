"""Handlers get what they ask for, and what they raise decides what becomes of an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pgmb
from pgmb.app import App, Delivery, Reject, Retry


@dataclass
class Order:
    number: int
    total: float


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_smoke(dsn: str) -> None:
    app = App(dsn)
    seen: list[Any] = []

    @app.on("order.*", queue="billing", concurrency=3)
    async def charge(order: Order) -> None:
        seen.append(order)

    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop))
    async with await pgmb.aconnect(dsn) as broker:
        async with asyncio.timeout(20):
            while not await broker.queue_status():
                await asyncio.sleep(0.01)
        await broker.publish("order.created", Order(1, 2.5))
        await broker.publish_many("order.created", [Order(n, 2.5) for n in range(1000)])
        await until(lambda: len(seen) == 1001)
        stop.set()
        await working
        assert seen[0] == Order(1, 2.5)
        assert (await broker.queue_status())[0].leases == 0
