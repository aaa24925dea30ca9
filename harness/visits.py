"""Requests as a web server sees them, parsed no further than needed, and ways to answer them.

A manner is how a path is answered. It is called with the visit, and lets it end by `answer` or in worse ways.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

_NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"


class Arrival(NamedTuple):
    """A request that came."""

    at: float
    """By the machine's clock, in seconds since 1970."""
    path: str
    headers: dict[str, str]
    """Those that are remembered, by their names in lower case."""
    body: bytes


class Book:
    """What came. Without `headers` requests are counted and nothing else is kept of them."""

    def __init__(self, headers: tuple[str, ...] | None) -> None:
        self.names = headers
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.first = self.last = 0.0
        self.arrivals: list[Arrival] = []
        self.answered: list[tuple[int, int]] = []
        """The number of an arrival, and the status that it was answered with."""
        self.under_way: Counter[str] = Counter()
        self.most_under_way: Counter[str] = Counter()

    def enter(self, path: str, head: bytes, body: bytes) -> int:
        self.count += 1
        self.last = time.time()
        if self.count == 1:
            self.first = self.last
        if self.names is not None:
            found = dict.fromkeys(self.names, "")
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                lower = name.lower().decode()
                if lower in found:
                    found[lower] = value.strip().decode()
            self.arrivals.append(Arrival(self.last, path, found, body))
        return self.count - 1


class Visit:
    """One request, to be answered once."""

    def __init__(self, book: Book, transport: asyncio.Transport, path: str, number: int) -> None:
        self.transport = transport
        self.path = path
        self.number = number
        self._book = book
        book.under_way[path] += 1
        book.most_under_way[path] = max(book.most_under_way[path], book.under_way[path])
        self.open = True

    @property
    def arrival(self) -> Arrival:
        return self._book.arrivals[self.number]

    def answer(self, status: int = 204, *headers: str, body: bytes = b"") -> None:
        if not self.end():
            return
        self._book.answered.append((self.number, status))
        if status == 204 and not headers:
            self.transport.write(_NO_CONTENT)
            return
        lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *headers, "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)

    def end(self) -> bool:
        """It is over, answered or not. False if it was already."""
        if not self.open:
            return False
        self.open = False
        self._book.under_way[self.path] -= 1
        return True


Manner: TypeAlias = Callable[[Visit], None]


class Connection(asyncio.Protocol):
    """Keeps the connection and answers 204 at once, but for paths whose first part names a manner."""

    def __init__(self, book: Book, manners: Mapping[str, Manner]) -> None:
        self._book = book
        self._manners = manners
        self._rest = b""
        self._visits: list[Visit] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        while (end := data.find(b"\r\n\r\n")) >= 0:
            # As aiohttp and the standard library spell it.
            at = data.find(b"\r\nContent-Length: ", 0, end)
            length = int(data[at + 18 : data.index(b"\r\n", at + 18)]) if at >= 0 else 0
            whole = end + 4 + length
            if len(data) < whole:
                break
            self._request(data[:end], data[end + 4 : whole])
            data = data[whole:]
        self._rest = data

    def _request(self, head: bytes, body: bytes) -> None:
        book = self._book
        if book.names is None and not self._manners:
            book.enter("", b"", b"")
            self._transport.write(_NO_CONTENT)
            return
        path = head.split(b" ", 2)[1].decode()
        visit = Visit(book, self._transport, path, book.enter(path, head, body))
        manner = self._manners.get(path.split("/", 2)[1])
        if manner is None:
            visit.answer()
            return
        self._visits = [earlier for earlier in self._visits if earlier.open]
        self._visits.append(visit)
        manner(visit)

    def connection_lost(self, exc: Exception | None) -> None:
        for visit in self._visits:
            visit.end()
