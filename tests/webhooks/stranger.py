"""A raw HTTP server on loopback that answers what a test says, to the byte, and counts who came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Stranger:
    """Reads each request and has it answered."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.requests.append(head + body)
                self.asked.set()
                await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def listening(
    answer: Answer, hosts: Sequence[str] = ("127.0.0.1",), port: int = 0
) -> AsyncIterator[Stranger]:
    """A stranger at all these addresses, on one port."""
    stranger = Stranger(answer)
    servers: list[asyncio.Server] = []
    try:
        for host in hosts:
            server = await asyncio.start_server(stranger.handle, host, stranger.port or port)
            servers.append(server)
            stranger.port = server.sockets[0].getsockname()[1]
        yield stranger
    finally:
        for server in servers:
            server.close()
        await stranger.stop()
        for server in servers:
            await server.wait_closed()


def saying(*parts: bytes) -> Answer:
    """Answers these bytes, and keeps the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


def status(code: int, *headers: str, body: bytes = b"") -> bytes:
    """A whole response."""
    lines = [f"HTTP/1.1 {code} Said", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


OK = status(200)
