"""A web server in a process of its own: it costs as little as can be, and tells what came."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Any, Self

from harness.visits import Arrival, Book, Connection, Manner

_processes = multiprocessing.get_context("forkserver")


class Sink:
    """Answers 204 to everything, but for paths whose first part names a manner: see `visits`.

    headers: which to remember of each request, beside its path and body; none: requests are only counted.
    """

    def __init__(
        self,
        headers: tuple[str, ...] | None = None,
        manners: Mapping[str, Manner] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(
            target=_serve, args=(theirs, host, headers, dict(manners or {})), daemon=True
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

    def arrivals(self) -> list[Arrival]:
        found: list[Arrival] = self._ask("arrivals")
        return found

    def answered(self) -> dict[int, int]:
        """The status by the number of the arrival; not all need be answered."""
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
        """Until so many requests came."""
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


def _serve(pipe: Pipe, host: str, headers: tuple[str, ...] | None, manners: dict[str, Manner]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_until_closed(pipe, host, headers, manners))


async def _until_closed(
    pipe: Pipe, host: str, headers: tuple[str, ...] | None, manners: dict[str, Manner]
) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    book = Book(headers)

    def tell() -> None:
        try:
            what = pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            closed.set()
            return
        found = getattr(book, what)
        pipe.send(found() if callable(found) else found)

    # As many as ask at once may wait to be let in.
    server = await loop.create_server(lambda: Connection(book, manners), host, 0, backlog=4096)
    loop.add_reader(pipe.fileno(), tell)
    pipe.send(server.sockets[0].getsockname()[1])
    await closed.wait()
    server.close()
