"""Thousands of readers of server-sent events in one process of their own, which check what they get.

Reads commands from its standard input, a line each, and answers each with a line of JSON:

    connect N F  N readers more, who wait for what is numbered from F; answers when each knows its place
    churn N S    N of them leave at random within S seconds, and come back with their last id
    stop N S     N of them read nothing for S seconds
    finish UPTO  waits until all have what was published with a number below, and reports
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any, Final, cast
from urllib.parse import quote

import uvloop

GROUPS: Final = 10
"""Each reader asks for one event in so many."""
_PAYLOAD: Final = re.compile(rb'"n":(\d+),"group":\d,"at":([\d.]+)')
_CONNECTING: Final = 200
"""Connections that are being made at a time."""
_PATIENCE: Final = 90.0
_ROOT: Final = Path(__file__).parents[1]


def payload(number: int) -> str:
    """What is to be published: its number says who asks for it."""
    return f'{{"n":{number},"group":{number % GROUPS},"at":{time.time():.6f}}}'


class SseReaders:
    """The readers' process, told what to do."""

    def __init__(self, ports: Sequence[int], key: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.sse_readers", ",".join(map(str, ports)), key],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the readers ended with {self._process.wait(10)}")
        told: dict[str, Any] = json.loads(answer)
        return told

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Connection(asyncio.Protocol):
    """One connection of a reader. What comes of one that the reader has left counts no more."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._reader.begin(self)

    def data_received(self, data: bytes) -> None:
        self._reader.receive(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.lose(self)


class _Reader:
    """One reader, over as many connections as it takes, one at a time."""

    def __init__(self, readers: _Readers, group: int, first: int) -> None:
        self.readers = readers
        self.group = group
        self.first = -(-(first - group) // GROUPS)
        self.seen = bytearray()
        """By number, from the first that it waits for: how often it came."""
        self.last = -1
        self.last_id = b""
        self.since = 0.0
        self.placed = asyncio.Event()
        self._chunks: list[tuple[float, bytes]] = []
        self._rest = b""
        self._current: _Connection | None = None

    async def connect(self) -> None:
        while True:
            port = random.choice(self.readers.ports)
            try:
                await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self), "127.0.0.1", port
                )
                return
            except OSError:
                await asyncio.sleep(random.random() * 0.5)

    def begin(self, connection: _Connection) -> None:
        self.digest()
        self._rest = b""
        self._current = connection
        self.since = time.time()
        assert connection.transport is not None
        connection.transport.write(self.readers.request(self.group, self.last_id))

    def receive(self, connection: _Connection, data: bytes) -> None:
        if connection is not self._current:
            return
        # Looked at later: readers are many, have one core, and must not be what is measured.
        self._chunks.append((time.time(), data))
        if not self.placed.is_set() and b"\nid: " in data:
            self.placed.set()

    def lose(self, connection: _Connection) -> None:
        if connection is self._current:
            self._current = None
            self.readers.lost += 1
            self.readers.spawn(self.come_back(random.random()))

    def digest(self) -> None:
        """Look at what came."""
        for now, data in self._chunks:
            if data.startswith(b"HTTP/") and not data.startswith(b"HTTP/1.1 200"):
                self.readers.complain(data[:200].decode())
            whole, found, self._rest = (self._rest + data).rpartition(b"\n\n")
            if not found:
                continue
            for number, at in _PAYLOAD.findall(whole):
                self._take(int(number), now, float(at))
            place = whole.rfind(b"\nid: ")
            if place >= 0:
                self.last_id = whole[place + 5 :].partition(b"\n")[0]
                self.readers.resets += b"event: reset" in whole
        self._chunks.clear()

    def _take(self, number: int, now: float, at: float) -> None:
        if number < self.last:
            self.readers.out_of_order += 1
        self.last = number
        place = number // GROUPS - self.first
        if place < 0:
            # Just before it came: the server was about to read it.
            return
        if place >= len(self.seen):
            self.seen.extend(bytes(place + 1 - len(self.seen)))
        self.seen[place] = min(255, self.seen[place] + 1)
        self.readers.events += 1
        if at > self.since:
            # What it missed while it was away is not late.
            self.readers.delays.append(now - at)

    async def leave(self) -> None:
        """Go, and come back; unless it is on its way back already."""
        left, self._current = self._current, None
        if left is not None and left.transport is not None:
            left.transport.abort()
            await self.come_back(random.random() * 0.5)

    async def come_back(self, after: float) -> None:
        await asyncio.sleep(after)
        self.readers.came_back += 1
        await self.connect()

    async def stop(self, seconds: float) -> None:
        connection = self._current
        transport = None if connection is None else connection.transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading()
            await asyncio.sleep(seconds)
            with contextlib.suppress(RuntimeError):
                transport.resume_reading()

    @property
    def repeated(self) -> int:
        return len(self.seen) - self.seen.count(0) - self.seen.count(1)

    def missing(self, upto: int) -> int:
        """How many it has not got of those below."""
        due = self._due(upto)
        return due - len(self.seen[:due]) + self.seen[:due].count(0)

    def beyond(self, upto: int) -> int:
        """How many it has got that were never committed: those have higher numbers."""
        rest = self.seen[self._due(upto) :]
        return len(rest) - rest.count(0)

    def _due(self, upto: int) -> int:
        return len(range(self.first * GROUPS + self.group, upto, GROUPS))


class _Readers:
    def __init__(self, ports: Sequence[int], key: str) -> None:
        self.ports = ports
        self.key = key
        self.delays: list[float] = []
        self.events = self.lost = self.came_back = self.out_of_order = self.resets = 0
        self.complaints: list[str] = []
        self._all: list[_Reader] = []
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

    async def connect(self, count: int, first: int) -> dict[str, Any]:
        gate = asyncio.Semaphore(_CONNECTING)

        async def one(reader: _Reader) -> None:
            async with gate:
                await reader.connect()
                await asyncio.wait_for(reader.placed.wait(), _PATIENCE)

        added = [_Reader(self, (len(self._all) + place) % GROUPS, first) for place in range(count)]
        self._all.extend(added)
        await asyncio.gather(*(one(reader) for reader in added))
        return {"readers": len(self._all)}

    async def churn(self, count: int, seconds: float) -> dict[str, Any]:
        async def one(reader: _Reader) -> None:
            await asyncio.sleep(random.random() * seconds)
            await reader.leave()

        for reader in random.sample(self._all, count):
            self.spawn(one(reader))
        return {"churning": count}

    async def stop(self, count: int, seconds: float) -> dict[str, Any]:
        for reader in random.sample(self._all, count):
            self.spawn(reader.stop(seconds))
        return {"stopped": count}

    def _behind(self, upto: int) -> bool:
        for reader in self._all:
            reader.digest()
        return any(reader.missing(upto) for reader in self._all)

    async def finish(self, upto: int) -> dict[str, Any]:
        # Looking takes seconds: what was just published shall not wait for that.
        await asyncio.sleep(1)
        deadline = time.monotonic() + _PATIENCE
        while self._behind(upto) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        delays = sorted(self.delays)
        cut = quantiles(delays, n=1000) if len(delays) > 1 else [0.0] * 999
        report: dict[str, Any] = {
            "events": self.events,
            "missing": sum(reader.missing(upto) for reader in self._all),
            "repeated": sum(reader.repeated for reader in self._all),
            "out_of_order": self.out_of_order,
            "phantoms": sum(reader.beyond(upto) for reader in self._all),
            "resets": self.resets,
            "came_back": self.came_back,
            "lost": self.lost,
            "p50": cut[499],
            "p99": cut[989],
            "most": delays[-1] if delays else 0.0,
            "complaints": self.complaints,
        }
        self.delays = []
        self.events = self.lost = self.came_back = self.out_of_order = self.resets = 0
        return report


async def _obey(readers: _Readers) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer
    )
    while line := (await lines.readline()).decode().split():
        match line:
            case ["connect", count, first]:
                answer = await readers.connect(int(count), int(first))
            case ["churn", count, seconds]:
                answer = await readers.churn(int(count), float(seconds))
            case ["stop", count, seconds]:
                answer = await readers.stop(int(count), float(seconds))
            case ["finish", upto]:
                answer = await readers.finish(int(upto))
            case _:
                raise ValueError(f"not a command: {line}")
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # What is measured is the server, not this.
    gc.disable()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_obey(_Readers([int(port) for port in sys.argv[1].split(",")], sys.argv[2])))
