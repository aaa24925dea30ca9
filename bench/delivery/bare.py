"""A bare aiohttp loop: so many posts at a time, the bodies and headers at hand, nothing done afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import cycle
from uuid import uuid4

import aiohttp

from bench.contender import Contender
from bench.crew import Work
from bench.payload import TOPIC, payload
from bench.wire import Client

_FIXED = {
    "content-type": "application/json",
    "ce-specversion": "1.0",
    "ce-source": "/pgmb/main",
    "ce-type": TOPIC,
}


def post_for(client: Client, contender: Contender, *, url: str, seconds: float, at_once: int) -> Work:
    bodies = cycle([(str(uuid4()), payload(number)) for number in range(10_000)])

    def measured() -> dict[str, float]:
        return {"messages": asyncio.run(_post(url, bodies, seconds, at_once))}

    return measured


async def _post(url: str, bodies: Iterator[tuple[str, bytes]], seconds: float, at_once: int) -> int:
    """The headers that a dispatcher sends, those that differ from post to post made here as there."""

    posted, end = 0, time.monotonic() + seconds

    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        nonlocal posted
        while time.monotonic() < end:
            identity, body = next(bodies)
            headers = {
                **_FIXED,
                "ce-id": identity,
                "ce-time": "2030-01-01T00:00:00.000000+00:00",
                "idempotency-key": identity,
                "webhook-id": identity,
                "webhook-timestamp": str(int(time.time())),
                "pgmb-attempt": "1",
            }
            async with session.post(url, data=body, headers=headers) as response:
                await response.read()
                if response.status != 204:
                    raise RuntimeError(f"the server answered {response.status}")
            posted += 1

    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one_after_the_other(session))
    return posted
