"""Clients that hold a connection in each state it can be in, as many and as long as the server lets them.

Run as a process of its own: `python -m faults.server.strangers ATTACK HOST PORT SECONDS [KEY]` prints as JSON
how many connections it opened, how many the server had closed after so many seconds, when the first and the
last of these were closed, and how many bytes it could send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

FROM: Final = "127.0.0.66"
"""The strangers' address: the clients that must not notice come from another."""
_LINE: Final = b"GET /livez HTTP/1.1\r\nHost: pgmb\r\n"
_SMALL: Final = _LINE + b"\r\n"
_LARGE: Final = b"GET /v1/openapi.json HTTP/1.1\r\nHost: pgmb\r\n\r\n"
"""The largest answer that needs no key."""
_POST: Final = b"POST /ui/login HTTP/1.1\r\nHost: pgmb\r\nContent-Type: application/x-www-form-urlencoded\r\n"
_CHUNKED: Final = _POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nkey=\r\n"
_MOST_BYTES: Final = 60 << 20


@dataclass
class Strangers:
    host: str
    port: int
    seconds: float
    key: str = ""
    opened: int = 0
    refused: int = 0
    sent: int = 0
    closed: list[float] = field(default_factory=list[float])
    _open: list[socket.socket] = field(default_factory=list[socket.socket])

    async def connection(self, first: bytes = b"", *, small_buffer: bool = False) -> socket.socket | None:
        """Open a connection and send something. None if the server does not take it."""
        one = socket.socket()
        one.setblocking(False)
        one.bind((FROM, 0))
        if small_buffer:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(10):
                await loop.sock_connect(one, (self.host, self.port))
                await loop.sock_sendall(one, first)
        except OSError:
            self.refused += 1
            one.close()
            return None
        self.opened += 1
        self._open.append(one)
        return one

    async def many(
        self, number: int, first: bytes = b"", *, small_buffer: bool = False
    ) -> list[socket.socket]:
        opened: list[socket.socket] = []
        for _ in range(number):
            one = await self.connection(first, small_buffer=small_buffer)
            if one is not None:
                opened.append(one)
        return opened

    async def until_closed(self, connections: list[socket.socket], *, reading: bool = True) -> None:
        """Wait until the server has closed them, or the time is over."""
        began = time.monotonic()
        waiting = list(connections)
        while waiting and time.monotonic() - began < self.seconds:
            await asyncio.sleep(0.25)
            still = [one for one in waiting if not _is_closed(one, reading)]
            self.closed += [time.monotonic() - began] * (len(waiting) - len(still))
            waiting = still

    async def trickle(self, connections: list[socket.socket], part: bytes, every: float = 0.5) -> None:
        """Send a little again and again, until the server has closed them all or the time is over."""
        began = time.monotonic()
        waiting = list(connections)
        while waiting and time.monotonic() - began < self.seconds:
            still: list[socket.socket] = []
            for one in waiting:
                with contextlib.suppress(BlockingIOError):
                    if _is_closed(one, True):
                        self.closed.append(time.monotonic() - began)
                        continue
                    try:
                        self.sent += one.send(part)
                    except (ConnectionError, TimeoutError):
                        self.closed.append(time.monotonic() - began)
                        continue
                still.append(one)
            waiting = still
            await asyncio.sleep(every)

    async def flood(self, one: socket.socket | None, part: bytes) -> None:
        """Send as much as the server takes, at most 60 MB."""
        if one is None:
            return
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self.seconds):
                while self.sent < _MOST_BYTES:
                    await loop.sock_sendall(one, part)
                    self.sent += len(part)
                    if _is_closed(one, True):
                        break
        if self.sent < _MOST_BYTES and time.monotonic() - began < self.seconds:
            self.closed.append(time.monotonic() - began)
        else:
            await self.until_closed([one])

    def report(self) -> str:
        return json.dumps(
            {
                "opened": self.opened,
                "refused": self.refused,
                "closed": len(self.closed),
                "first": min(self.closed, default=None),
                "last": max(self.closed, default=None),
                "sent": self.sent,
            }
        )


def _is_closed(one: socket.socket, reading: bool) -> bool:
    """Whether the server has closed a connection. Without `reading`, what it sent stays unread."""
    if not reading:
        # TCP_INFO begins with the state of the connection: established, or half closed by the peer with data.
        (state,) = struct.unpack_from("B", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8))
        return bool(state != 1)
    try:
        while data := one.recv(1 << 16):
            del data
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True


Attack: TypeAlias = Callable[[Strangers], Awaitable[None]]
ATTACKS: Final[dict[str, Attack]] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    def declare(run: Attack) -> Attack:
        ATTACKS[name] = run
        return run

    return declare


@attack("handshaking: number")
async def _(self: Strangers) -> None:
    await self.until_closed(await self.many(2000))


@attack("handshaking: bytes")
async def _(self: Strangers) -> None:
    # A record of a handshake that says that 16 MB follow, in records of 16 KB.
    record = b"\x16\x03\x01\x40\x00"
    await self.flood(await self.connection(record + b"\x01\xff\xff\xff"), record + b"x" * 0x4000)


@attack("new: number")
async def _(self: Strangers) -> None:
    await self.until_closed(await self.many(4000))


@attack("head: number")
async def _(self: Strangers) -> None:
    await self.until_closed(await self.many(4000, _LINE + b"X: "))


@attack("head: time")
async def _(self: Strangers) -> None:
    await self.trickle(await self.many(100, _LINE), b"X: y\r\n")


@attack("head: bytes, one field")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_LINE + b"X: "), b"y" * 100_000)


@attack("head: bytes, many fields")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_LINE), (b"X: " + b"y" * 1000 + b"\r\n") * 100)


@attack("body: number")
async def _(self: Strangers) -> None:
    body = b"Content-Length: 4000000\r\n\r\n" + b"k" * 200_000
    await self.until_closed(await self.many(2000, _POST + body))


@attack("body: time")
async def _(self: Strangers) -> None:
    await self.trickle(await self.many(100, _POST + b"Content-Length: 100000\r\n\r\n"), b"k")


@attack("body: bytes")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_POST + b"Content-Length: 99999999999\r\n\r\n"), b"k" * 100_000)


@attack("body: bytes, one extension of a chunk")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_CHUNKED + b"1;x="), b"y" * 100_000)


@attack("trailer: bytes, many fields")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_CHUNKED + b"0\r\n"), (b"X: " + b"y" * 1000 + b"\r\n") * 100)


@attack("trailer: bytes, one field")
async def _(self: Strangers) -> None:
    await self.flood(await self.connection(_CHUNKED + b"0\r\nX: "), b"y" * 100_000)


@attack("trailer: time")
async def _(self: Strangers) -> None:
    await self.trickle(await self.many(100, _CHUNKED + b"0\r\n"), b"X: y\r\n")


@attack("queued: number")
async def _(self: Strangers) -> None:
    # Two segments each: 58 KB.
    await self.until_closed(await self.many(300, _SMALL * 1600, small_buffer=True), reading=False)


@attack("queued: bytes")
async def _(self: Strangers) -> None:
    head = _LINE + b"X: " + b"y" * 50_000 + b"\r\n\r\n"
    await self.until_closed(await self.many(300, head * 5, small_buffer=True), reading=False)


@attack("answering: unread")
async def _(self: Strangers) -> None:
    await self.until_closed(await self.many(2000, _LARGE * 4, small_buffer=True), reading=False)


@attack("answering: read a byte at a time")
async def _(self: Strangers) -> None:
    connections = await self.many(300, _LARGE * 30, small_buffer=True)
    began = time.monotonic()
    while connections and time.monotonic() - began < self.seconds:
        await asyncio.sleep(0.25)
        still: list[socket.socket] = []
        for one in connections:
            try:
                if one.recv(1):
                    still.append(one)
            except BlockingIOError:
                still.append(one)
            except OSError:
                pass
        self.closed += [time.monotonic() - began] * (len(connections) - len(still))
        connections = still


@attack("answering: unread events")
async def _(self: Strangers) -> None:
    head = b"GET /v1/streams/main/events HTTP/1.1\r\nHost: pgmb\r\nAuthorization: Bearer " + self.key.encode()
    await self.until_closed(await self.many(100, head + b"\r\n\r\n", small_buffer=True), reading=False)


@attack("idle: number")
async def _(self: Strangers) -> None:
    await self.until_closed(await self.many(4000, _SMALL))


@attack("closing: unread")
async def _(self: Strangers) -> None:
    head = _LARGE.replace(b"Host", b"Connection: close\r\nHost")
    await self.until_closed(await self.many(2000, head, small_buffer=True), reading=False)


@attack("closing: half closed")
async def _(self: Strangers) -> None:
    connections = await self.many(2000, _LINE)
    for one in connections:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_WR)
    await self.until_closed(connections)


async def _main(name: str, host: str, port: int, seconds: float, key: str) -> None:
    strangers = Strangers(host, port, seconds, key)
    await ATTACKS[name](strangers)
    print(strangers.report(), flush=True)
    # Who started it looks at the server meanwhile.
    await asyncio.sleep(60)


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    _name, _host, _port, _seconds, *_key = sys.argv[1:]
    asyncio.run(_main(_name, _host, int(_port), float(_seconds), "".join(_key)))
