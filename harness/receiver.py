"""An HTTP server on loopback that remembers the requests it gets and answers them as it is told.

`Receiver` runs in the caller's event loop, `ReceiverProcess` in a process of its own. An answer is a function
of an `Exchange`: `harness.answers` has good and bad ones.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

_NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
_processes = multiprocessing.get_context("forkserver")


class Request(NamedTuple):
    at: float
    """By the machine's clock, in seconds since 1970."""
    path: str
    headers: dict[str, str]
    """By names in lower case: all of them, or those that the log keeps."""
    body: bytes
    head: bytes = b""
    """The request line and the headers as they came, if the log keeps all headers."""


class RequestLog:
    """The requests that came.

    headers: the names of the headers to keep, or `ALL_HEADERS`. None: requests are only counted.
    """

    ALL_HEADERS = ("*",)

    def __init__(self, headers: tuple[str, ...] | None) -> None:
        self.names = headers
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.first = self.last = 0.0
        self.requests: list[Request] = []
        self.answered: list[tuple[int, int]] = []
        """The number of a request, and the status that it was answered with."""
        self.under_way: Counter[str] = Counter()
        self.most_under_way: Counter[str] = Counter()

    def add(self, path: str, head: bytes, body: bytes) -> int:
        """Returns the number of the request."""
        self.count += 1
        self.last = time.time()
        if self.count == 1:
            self.first = self.last
        if self.names is not None:
            every = self.names == self.ALL_HEADERS
            found = {} if every else dict.fromkeys(self.names, "")
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                lower = name.lower().decode()
                if every or lower in found:
                    found[lower] = value.strip().decode()
            self.requests.append(Request(self.last, path, found, body, head if every else b""))
        return self.count - 1


class Exchange:
    """One request, to be answered once."""

    def __init__(self, log: RequestLog, transport: asyncio.Transport, path: str, number: int) -> None:
        self.transport = transport
        self.path = path
        self.open = True
        self._log = log
        self._number = number
        log.under_way[path] += 1
        log.most_under_way[path] = max(log.most_under_way[path], log.under_way[path])

    @property
    def request(self) -> Request:
        return self._log.requests[self._number]

    def answer(self, status: int = 204, *headers: str, body: bytes = b"") -> None:
        if not self.end():
            return
        self._log.answered.append((self._number, status))
        self.transport.write(response(status, *headers, body=body))

    async def send(self, data: bytes) -> None:
        """Sends bytes that need not be HTTP. The exchange goes on."""
        self.transport.write(data)
        while self.transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def end(self) -> bool:
        """It is over, answered or not. False if it was already."""
        if not self.open:
            return False
        self.open = False
        self._log.under_way[self.path] -= 1
        return True


Answer: TypeAlias = Callable[[Exchange], "int | Awaitable[int | None] | None"]
"""Answers by itself, or returns the status to answer with."""


def response(status: int, *headers: str, body: bytes = b"") -> bytes:
    if status == 204 and not headers:
        return _NO_CONTENT
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class _Connection(asyncio.Protocol):
    """Keeps the connection open and answers each request, with 204 unless its path has an answer."""

    def __init__(self, log: RequestLog, choose: Callable[[str], Answer | None] | None) -> None:
        self._log = log
        self._choose = choose
        self._unread = b""
        self._exchanges: list[Exchange] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._unread:
            data = self._unread + data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            head = data[:end]
            _, found, rest = head.lower().partition(b"\r\ncontent-length:")
            whole = end + 4 + (int(rest.partition(b"\r\n")[0]) if found else 0)
            if len(data) < whole:
                break
            self._request(head, data[end + 4 : whole])
            data = data[whole:]
        self._unread = data

    def _request(self, head: bytes, body: bytes) -> None:
        log = self._log
        if log.names is None and self._choose is None:
            log.add("", b"", b"")
            self.transport.write(_NO_CONTENT)
            return
        path = head.split(b" ", 2)[1].decode()
        exchange = Exchange(log, self.transport, path, log.add(path, head, body))
        answer = self._choose(path) if self._choose else None
        if answer is None:
            exchange.answer()
            return
        self._exchanges = [earlier for earlier in self._exchanges if earlier.open]
        self._exchanges.append(exchange)
        answered = answer(exchange)
        if isinstance(answered, Awaitable):
            task = asyncio.ensure_future(self._wait(exchange, answered))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif answered is not None:
            exchange.answer(answered)

    async def _wait(self, exchange: Exchange, answered: Awaitable[int | None]) -> None:
        status = await answered
        if status is not None:
            exchange.answer(status)

    def connection_lost(self, exc: Exception | None) -> None:
        for exchange in self._exchanges:
            exchange.end()
        for task in self._tasks:
            task.cancel()


class Receiver:
    """A server in this event loop. It listens at all `hosts`, on one port, and keeps whole requests.

    answer: can be replaced while it runs.
    """

    def __init__(
        self, answer: Answer = lambda _: 204, hosts: Sequence[str] = ("127.0.0.1",), port: int = 0
    ) -> None:
        self.answer = answer
        self.port = port
        self.connections = 0
        """How many were made."""
        self._hosts = hosts
        self._log = RequestLog(RequestLog.ALL_HEADERS)
        self._servers: list[asyncio.Server] = []
        self._made: list[_Connection] = []

    @property
    def url(self) -> str:
        return f"http://{self._hosts[0]}:{self.port}"

    @property
    def requests(self) -> list[Request]:
        return self._log.requests

    @property
    def most_under_way(self) -> int:
        """The most requests at a time at one path."""
        return max(self._log.most_under_way.values(), default=0)

    async def until(self, done: Callable[[], object], within: float = 120.0) -> None:
        """Waits until something is so."""
        async with asyncio.timeout(within):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _connect(self) -> _Connection:
        self.connections += 1
        connection = _Connection(self._log, lambda _: self.answer)
        self._made.append(connection)
        return connection

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for host in self._hosts:
            server = await loop.create_server(self._connect, host, self.port)
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        for connection in self._made:
            connection.transport.abort()
        for server in self._servers:
            await server.wait_closed()


class ReceiverProcess:
    """A server in a process of its own, which costs as little as can be.

    headers: what is kept of each request, see `RequestLog`.
    answers: by the first part of the path. 204 for all others.
    """

    def __init__(
        self,
        headers: tuple[str, ...] | None = None,
        answers: Mapping[str, Answer] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(theirs, host, headers, dict(answers or {})), daemon=True
        )
        self._process.start()
        theirs.close()
        self.port = int(self._pipe.recv())
        self.url = f"http://{host}:{self.port}"
        pid = self._process.pid
        assert pid is not None
        self.pid = pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def count(self) -> int:
        return int(self._ask("count"))

    def requests(self) -> list[Request]:
        found: list[Request] = self._ask("requests")
        return found

    def answered(self) -> dict[int, int]:
        """The status by the number of the request; not all need be answered."""
        return dict(self._ask("answered"))

    def most_under_way(self) -> dict[str, int]:
        """The most requests at a time, by path."""
        return dict(self._ask("most_under_way"))

    def seconds(self) -> float:
        """From the first request to the last."""
        return float(self._ask("last")) - float(self._ask("first"))

    def clear(self) -> None:
        self._ask("clear")

    def wait_for(self, count: int, within: float = 120.0) -> None:
        """Waits until so many requests came."""
        deadline = time.monotonic() + within
        while (came := self.count()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{came} of {count} requests came within {within:.0f} s")
            time.sleep(0.02)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()


def _serve(pipe: Pipe, host: str, headers: tuple[str, ...] | None, answers: dict[str, Answer]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_until_closed(pipe, host, headers, answers))


async def _until_closed(
    pipe: Pipe, host: str, headers: tuple[str, ...] | None, answers: dict[str, Answer]
) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    log = RequestLog(headers)

    def tell() -> None:
        try:
            what = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            closed.set()
            return
        found = getattr(log, what)
        pipe.send(found() if callable(found) else found)

    def choose(path: str) -> Answer | None:
        return answers.get(path.split("/", 2)[1])

    # As many as ask at once may wait to be let in.
    server = await loop.create_server(
        lambda: _Connection(log, choose if answers else None), host, 0, backlog=4096
    )
    loop.add_reader(pipe.fileno(), tell)
    pipe.send(server.sockets[0].getsockname()[1])
    await closed.wait()
    server.close()
