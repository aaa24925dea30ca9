"""Thousands of readers of server-sent events in one process of their own, which check what they get.

Reads commands from its standard input, a line each, and answers each with a line of JSON:

    connect N F  N readers more, who wait for what is numbered from F; answers when each knows its place
    churn N S    N of them leave at random within S seconds and come back with their last id
    finish UPTO  waits until all have what was published with a number below, and reports
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import sys
import time
from collections.abc import Coroutine
from statistics import quantiles
from typing import Any, Final, cast
from urllib.parse import quote

import uvloop

GROUPS: Final = 10
"""Each reader asks for one event in so many."""
_FRAME: Final = re.compile(rb'id: (\S+)\n(?:data: [^\n]*"payload":\{"n":(\d+),"group":\d+,"at":([\d.]+)\})?')
_CONNECTING: Final = 200
"""Connections that are being made at a time."""
_PATIENCE: Final = 60.0


class Reader(asyncio.Protocol):
    """One reader, over as many connections as it takes."""

    def __init__(self, crowd: Crowd, group: int, first: int) -> None:
        self.crowd = crowd
        self.group = group
        self.next = first + (group - first) % GROUPS
        self.since = 0.0
        self.last_id = b""
        self.placed = asyncio.Event()
        self.wrong = 0
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._leaving = False

    async def connect(self) -> None:
        self._rest = b""
        self._leaving = False
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.crowd.port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.since = time.time()
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self.crowd.request(self.group, self.last_id))

    def data_received(self, data: bytes) -> None:
        now = time.time()
        if data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200"):
            self.crowd.complain(data[:200].decode())
        whole, found, rest = (self._rest + data).rpartition(b"\n\n")
        self._rest = rest
        if not found:
            return
        for last_id, number, at in _FRAME.findall(whole + b"\n\n"):
            self.last_id = last_id
            if not number:
                self.placed.set()
                continue
            if int(number) != self.next:
                self.wrong += 1
                self.crowd.complain(f"{number.decode()} came where {self.next} was due")
            self.next = int(number) + GROUPS
            self.crowd.events += 1
            if float(at) > self.since:
                # What it missed while it was away is not late.
                self.crowd.delays.append(now - float(at))
        self.placed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._leaving:
            self.crowd.lost += 1
            self.crowd.spawn(self.connect())

    async def leave_and_come_back(self, away: float) -> None:
        self._leaving = True
        if self._transport is not None:
            self._transport.abort()
        await asyncio.sleep(away)
        self.crowd.came_back += 1
        await self.connect()


class Crowd:
    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self.key = key
        self.delays: list[float] = []
        self.events = 0
        self.readers: list[Reader] = []
        self.lost = 0
        self.came_back = 0
        self.complaints: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, group: int, last_id: bytes) -> bytes:
        asked = quote(json.dumps({"payload": {"group": group}}))
        lines = [
            f"GET /v1/streams/main/events?equals={asked} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self.key}",
        ]
        if last_id:
            lines.append(f"Last-Event-ID: {last_id.decode()}")
        return "\r\n".join([*lines, "", ""]).encode()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def complain(self, what: str) -> None:
        if len(self.complaints) < 5:
            self.complaints.append(what)

    async def connect(self, count: int, first: int) -> dict[str, float]:
        gate = asyncio.Semaphore(_CONNECTING)

        async def one(reader: Reader) -> None:
            async with gate:
                await reader.connect()
                await asyncio.wait_for(reader.placed.wait(), _PATIENCE)

        added = [Reader(self, (len(self.readers) + place) % GROUPS, first) for place in range(count)]
        self.readers.extend(added)
        await asyncio.gather(*(one(reader) for reader in added))
        return {"readers": len(self.readers)}

    async def churn(self, count: int, seconds: float) -> dict[str, float]:
        async def one(reader: Reader) -> None:
            await asyncio.sleep(random.random() * seconds)
            await reader.leave_and_come_back(random.random() * 0.5)

        for reader in random.sample(self.readers, count):
            self.spawn(one(reader))
        return {"churning": count}

    async def finish(self, upto: int) -> dict[str, object]:
        deadline = time.monotonic() + _PATIENCE
        while (  # noqa: ASYNC110
            any(reader.next < upto for reader in self.readers) and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.05)
        behind = sum(reader.next < upto for reader in self.readers)
        delays = sorted(self.delays)
        cut = quantiles(delays, n=1000) if len(delays) > 1 else [0.0] * 999
        report = {
            "events": self.events,
            "gaps": behind + sum(reader.wrong for reader in self.readers),
            "came_back": self.came_back,
            "lost": self.lost,
            "p50": cut[499],
            "p99": cut[989],
            "p999": cut[998],
            "most": delays[-1] if delays else 0.0,
            "complaints": self.complaints,
        }
        for reader in self.readers:
            reader.wrong = 0
            reader.next += -(-max(0, upto - reader.next) // GROUPS) * GROUPS
        self.delays = []
        self.lost = self.came_back = self.events = 0
        return report


async def _obey(crowd: Crowd) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := (await lines.readline()).decode().split():
        match line:
            case ["connect", count, first]:
                answer: object = await crowd.connect(int(count), int(first))
            case ["churn", count, seconds]:
                answer = await crowd.churn(int(count), float(seconds))
            case ["finish", upto]:
                answer = await crowd.finish(int(upto))
            case _:
                raise ValueError(f"not a command: {line}")
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_obey(Crowd(int(sys.argv[1]), sys.argv[2])))
