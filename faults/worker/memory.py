"""A worker handles events for long: its memory stays flat, and no event sees the context of another."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import logging
import os
import random
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

import pgmb

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_GROWTH_KIB = 8 * 1024
"""What the second half may add: caches that fill, and pages that the allocator keeps."""
_PUBLISHED_AT_ONCE = 10_000


class Result(msgspec.Struct):
    events: int
    handled: int
    strange: list[str]
    """What an event saw of another."""
    memory: list[int]
    """KiB after each tenth."""

    @property
    def holds(self) -> bool:
        half = len(self.memory) // 2
        flat = max(self.memory[half:]) - max(self.memory[:half]) <= _GROWTH_KIB
        return self.handled == self.events and not self.strange and flat

    def __str__(self) -> str:
        memory = ", ".join(f"{kib / 1024:.1f}" for kib in self.memory)
        return (
            f"{self.handled} of {self.events} events handled; {len(self.strange)} saw another's context"
            f" {self.strange[:3]}; MiB after each tenth: {memory}"
        )


tenant: contextvars.ContextVar[int | None] = contextvars.ContextVar("tenant", default=None)
sessions: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
"""As libraries keep a session for each task."""


class Watch:
    """What handlers do to their context, and look for before that."""

    def __init__(self, seed: int) -> None:
        self.handled = 0
        self.strange: list[str] = []
        self._random = random.Random(seed)

    def enter(self, number: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        if (found := tenant.get()) is not None:
            self.strange.append(f"{number} has the tenant of {found}")
        if (found := sessions.get(task)) is not None:
            self.strange.append(f"{number} has the session of {found}")
        if decimal.getcontext().prec != _PRECISION:
            self.strange.append(f"{number} has a precision of {decimal.getcontext().prec}")
        if task.cancelling():
            self.strange.append(f"{number} is cancelled")

    async def handle(self, number: int) -> None:
        self.enter(number)
        task = asyncio.current_task()
        assert task is not None
        kind = self._random.randrange(8)
        self.handled += 1
        if kind == 0:
            tenant.set(number)
        elif kind == 1:
            sessions[task] = number
        elif kind == 2:
            decimal.setcontext(decimal.Context(prec=3))
        elif kind == 3:
            await asyncio.sleep(0)
            tenant.set(number)
            await asyncio.sleep(0)
        elif kind == 4:
            task.add_done_callback(lambda _: None)
        elif kind == 5 and number % 50 == 0:
            task.cancel()


_PRECISION = decimal.getcontext().prec


async def run(dsn: str, events: int, seed: int) -> Result:
    """Publish the events by and by, and handle them in this process by two queues' handlers."""
    logging.getLogger("pgmb.app").setLevel(logging.CRITICAL)
    app, watch, memory = pgmb.App(dsn), Watch(seed), list[int]()

    @app.on("one", queue="one", concurrency=10)
    async def one(payload: int) -> None:
        await watch.handle(payload)

    @app.on("two", queue="two", concurrency=4)
    async def two(delivery: pgmb.Delivery[int]) -> None:
        await watch.handle(delivery.payload)

    async with await pgmb.aconnect(dsn) as broker:
        for queue in ("one", "two"):
            await broker.create_queue(queue, [queue])
        stop = asyncio.Event()
        working = asyncio.create_task(app.work(stop))
        for begin in range(0, events, _PUBLISHED_AT_ONCE):
            end = min(begin + _PUBLISHED_AT_ONCE, events)
            for topic, half in (("one", 0), ("two", 1)):
                await broker.publish_many(topic, range(begin + half, end, 2))
            await _handled(watch, end)
            if end * 10 // events > len(memory):
                memory.append(_resident_kib())
        stop.set()
        await working
    await app.aclose()
    return Result(events, watch.handled, watch.strange, memory)


async def _handled(watch: Watch, events: int) -> None:
    async with asyncio.timeout(600):
        while watch.handled < events:  # noqa: ASYNC110 - handlers set nothing
            await asyncio.sleep(0.05)


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KIB
