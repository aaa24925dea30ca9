"""Readers with filters while events come in bursts and servers are killed: each gets its events once.

Some readers stay; others leave and come back ten times a second, to any process. What each must get is
computed here, from the numbers that were published. Whether a server's event loop stands still is told by the
processor time that the server uses while it owes an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import psutil
import psycopg

import pgmb
from faults.server.sse import Restarting

BURST: Final = 8_000
GROUPS: Final = 30
_PROCESSES: Final = 3
_COMING_BACK: Final = 6
_BACK_EVERY: Final = 0.1
_FILTER_FOR: Final = 10
"""Connections that use one filter."""
_BURST_WITHIN: Final = 10.0
"""Seconds until the next burst, unless those who stay have the last one earlier."""
_KILL_EVERY: Final = 3.0
_LONGEST_TURN: Final = 1.0
"""Seconds of processor time before an answer that needs none."""
_PATIENCE: Final = 120.0
_EVENT: Final = re.compile(rb'"n" ?: ?(\d+)')
_ID: Final = re.compile(rb"^id: (\S+)", re.MULTILINE)
_PUBLISH: Final = (
    "insert into pgmb.log_main (topic, payload)"
    " select 'filtered', json_build_object('n', n, 'g', n %% %s) from generate_series(%s::int, %s::int) n"
)


@dataclass(frozen=True, slots=True)
class Result:
    published: int
    arrived: int
    missing: int
    repeated: int
    foreign: int
    resets: int
    connections: int
    kills: int
    longest_turn: float
    seconds: float

    @property
    def holds(self) -> bool:
        wrong = self.missing or self.repeated or self.foreign or self.resets
        return not wrong and self.arrived > 0 and self.kills > 0 and self.longest_turn < _LONGEST_TURN

    def __str__(self) -> str:
        return (
            f"filters of server-sent events {'hold' if self.holds else 'VIOLATED'}: {GROUPS} filters, "
            f"{GROUPS + _COMING_BACK} readers, {self.published} published, {self.arrived} arrived | "
            f"{self.missing} missed, {self.repeated} repeated, {self.foreign} foreign, "
            f"{self.resets} resets | "
            f"{self.connections} connections, {self.kills} kills | "
            f"longest turn {self.longest_turn:.2f} s of processor time | {self.seconds:.0f} s"
        )


class _Reader:
    def __init__(self, group: int, key: str, ports: list[int], comes_back: bool) -> None:
        self.group = group
        self.got: Counter[int] = Counter()
        self.resets = 0
        self.connections = 0
        self.last_id = ""
        self.placed = asyncio.Event()
        self._counted = self._due = 0
        self._ports = ports
        self.comes_back = comes_back
        self._key = key

    def _request(self) -> bytes:
        wanted = f"$.payload.g == {self.group} || $.payload.n % 5 == 0 && $.payload.g > {self.group}"
        if self.comes_back:
            # A filter that nobody else has, and now and then another one: filters begin and end.
            wanted += f" || $.payload.n < -{1 + self.connections // _FILTER_FOR}"
        lines = [
            f"GET /v1/streams/main/events?{urlencode({'filter': wanted})} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self._key}",
        ]
        if self.last_id:
            lines.append(f"Last-Event-ID: {self.last_id}")
        return "\r\n".join([*lines, "", ""]).encode()

    def wants(self, number: int) -> bool:
        group = number % GROUPS
        return group == self.group or (number % 5 == 0 and group > self.group)

    def has(self, published: int) -> bool:
        """Whether it has as many as it wants of those numbered below."""
        while self._counted < published:
            self._due += self.wants(self._counted)
            self._counted += 1
        return len(self.got) >= self._due

    async def read(self) -> None:
        """Stay, or leave after a while, and come back with the last id; until cancelled."""
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await self._connected()
            if not self.comes_back:
                await asyncio.sleep(random.random() * 0.2)

    async def _connected(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", random.choice(self._ports))
        try:
            writer.write(self._request())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise AssertionError(head)
            self.connections += 1
            rest = b""
            async with asyncio.timeout(_BACK_EVERY if self.comes_back and self.last_id else None):
                async for chunk in _chunks(reader):
                    *frames, rest = (rest + chunk).split(b"\n\n")
                    for frame in frames:
                        self._take(frame)
        finally:
            writer.transport.abort()

    def _take(self, frame: bytes) -> None:
        if found := _ID.search(frame):
            self.last_id = found[1].decode()
            self.placed.set()
        if b"event: reset" in frame:
            self.resets += 1
        elif found := _EVENT.search(frame):
            self.got[int(found[1])] += 1


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _watch(server: Restarting, longest: list[float]) -> None:
    """Ask a server for what needs no database, and note how much processor time passes before it answers."""
    started = 0
    while True:
        await asyncio.sleep(0.02)
        with contextlib.suppress(OSError, psutil.Error, asyncio.IncompleteReadError):
            process = psutil.Process(server.pid)
            before = process.cpu_times()
            answered = asyncio.create_task(_livez(server.port))
            answered.add_done_callback(lambda task: task.cancelled() or task.exception())
            while not answered.done():
                await asyncio.wait({answered}, timeout=0.25)
                now = process.cpu_times()
                # The first answer comes when the process has started.
                if process.pid == started:
                    longest.append(now.user + now.system - before.user - before.system)
            await answered
            started = process.pid


async def _livez(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n")
    finally:
        writer.transport.abort()


def run(dsn: str, *, seconds: float, seed: int) -> Result:
    began = time.monotonic()
    with pgmb.connect(dsn, max_size=1) as broker:
        key = broker.create_api_key("readers", ["read:main"]).key
    with ExitStack() as stack:
        servers = [stack.enter_context(Restarting(dsn)) for _ in range(_PROCESSES)]
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        return asyncio.run(_play(servers, connection, key, seconds, random.Random(seed), began))


async def _play(
    servers: list[Restarting],
    connection: psycopg.Connection[Any],
    key: str,
    seconds: float,
    chance: random.Random,
    began: float,
) -> Result:
    ports = [server.port for server in servers]
    readers = [_Reader(group, key, ports, False) for group in range(GROUPS)]
    readers += [_Reader(chance.randrange(GROUPS), key, ports, True) for _ in range(_COMING_BACK)]
    longest = [0.0]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read()) for reader in readers]
        tasks += [group.create_task(_watch(server, longest)) for server in servers]
        async with asyncio.timeout(_PATIENCE):
            for reader in readers:
                await reader.placed.wait()
        until = time.monotonic() + seconds

        def all_have(published: int) -> bool:
            return all(reader.has(published) for reader in readers)

        async def publish() -> int:
            published = 0
            while time.monotonic() < until:
                await asyncio.to_thread(
                    connection.execute, _PUBLISH, [GROUPS, published, published + BURST - 1]
                )
                published += BURST
                # Filters cost a machine more than this, and an ever longer backlog would show nothing.
                await _until(partial(all_have, published), _BURST_WITHIN)
                await asyncio.sleep(chance.random() * _BURST_WITHIN / 10)
            return published

        async def kill() -> int:
            kills = 0
            while time.monotonic() < until:
                await asyncio.sleep(_KILL_EVERY * chance.uniform(0.5, 1.5))
                await asyncio.to_thread(chance.choice(servers).restart)
                kills += 1
            return kills

        publishing, killing = group.create_task(publish()), group.create_task(kill())
        published, kills = await publishing, await killing
        for reader in readers:
            # On a busy machine a tenth of a second may bring nothing.
            reader.comes_back = False
        await _until(partial(all_have, published), _PATIENCE)
        expected = {reader: {n for n in range(published) if reader.wants(n)} for reader in readers}
        # What would come twice comes now.
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
    return Result(
        published=published,
        arrived=sum(reader.got.total() for reader in readers),
        missing=sum(len(expected[reader] - reader.got.keys()) for reader in readers),
        repeated=sum(count - 1 for reader in readers for count in reader.got.values()),
        foreign=sum(len(reader.got.keys() - expected[reader]) for reader in readers),
        resets=sum(reader.resets for reader in readers),
        connections=sum(reader.connections for reader in readers),
        kills=kills,
        longest_turn=max(longest),
        seconds=time.monotonic() - began,
    )


async def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
