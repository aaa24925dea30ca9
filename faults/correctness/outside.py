"""Readers that keep their position outside the database: SQL, `tail`, server-sent events, Spark.

Each has read some numbers and goes on from its position, also on another server. A server may refuse a
position; it must not skip an event without an error.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psycopg

import pgmb
from faults.spark import files
from faults.spark.console import Console, NotDoneError
from harness.serving import serving

_PATIENCE = 30.0
"""Seconds that a reader waits for events that it should get."""


class RefusedError(Exception):
    """The server refused the reader's position and said so."""


class Outside(Protocol):
    """`seen` lists what it read, in order. `read` goes on until it has the numbers that it should get."""

    name: str
    seen: list[int]

    def read(self, dsn: str, expected: Collection[int]) -> None: ...

    def close(self) -> None: ...


class BySql:
    """Reads with pgmb.between from one position to the next."""

    def __init__(self, dsn: str, name: str = "SQL") -> None:
        self.name = name
        self.seen: list[int] = []
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._position = self._now(connection)

    def read(self, dsn: str, expected: Collection[int]) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            try:
                upto = self._now(connection)
                rows = connection.execute(
                    "select payload::text from pgmb.between('main', %s::pgmb.position, %s::pgmb.position,"
                    " max => 1000000)",
                    [self._position, upto],
                ).fetchall()
            except psycopg.Error as error:
                if not (error.sqlstate or "").startswith("MB0"):
                    raise
                raise RefusedError(str(error)) from error
        self.seen += [int(payload) for (payload,) in rows]
        self._position = upto

    def close(self) -> None:
        pass

    @staticmethod
    def _now(connection: psycopg.Connection[Any]) -> str:
        row = connection.execute("select pgmb.position('main')::text").fetchone()
        assert row is not None
        return str(row[0])


class ByTail:
    """Reads with the client's `tail`, resumed from the text of its position."""

    def __init__(self, dsn: str, name: str = "tail") -> None:
        self.name = name
        self.seen: list[int] = []
        with pgmb.connect(dsn, max_size=1) as broker, broker.tail(listen=False) as tail:
            self._position = str(tail.position)

    def read(self, dsn: str, expected: Collection[int]) -> None:
        with pgmb.connect(dsn, max_size=1) as broker:
            tail = broker.tail(after=self._position, follow=False)
            try:
                for event in tail:
                    self.seen.append(int(event.payload))
                    self._position = str(tail.position)
            except pgmb.PgmbError as error:
                raise RefusedError(str(error)) from error
            self._position = str(tail.position)

    def close(self) -> None:
        pass


class BySse:
    """Reads server-sent events, and comes back with the last id that it got."""

    def __init__(self, dsn: str, name: str = "SSE") -> None:
        self.name = name
        self.seen: list[int] = []
        self._last_id: str | None = None
        self._stack = ExitStack()
        self._port = 0
        self._dsn = ""
        with pgmb.connect(dsn, max_size=1) as broker:
            self._key = broker.create_api_key("outside", ["read:main"]).key
        self.read(dsn, ())

    def read(self, dsn: str, expected: Collection[int]) -> None:
        self._serve(dsn)
        wanted = set(expected) - set(self.seen)
        deadline = time.monotonic() + _PATIENCE
        with self._stream() as lines:
            for kind, text in lines(deadline):
                if kind == "id":
                    self._last_id = text
                elif kind == "event" and text == "reset":
                    raise RefusedError("reset")
                elif kind == "data" and (number := _number(text)) is not None:
                    self.seen.append(number)
                    wanted.discard(number)
                elif kind == "" and not wanted and self._last_id is not None:
                    return

    def close(self) -> None:
        self._stack.close()

    def _serve(self, dsn: str) -> None:
        if dsn != self._dsn:
            self._stack.close()
            served = self._stack.enter_context(serving(dsn, "serve", "--services", "http,ticker"))
            self._dsn, self._port = dsn, served.port

    @contextmanager
    def _stream(self) -> Iterator[Callable[[float], Iterator[tuple[str, str]]]]:
        """The lines of an answer as (field, value), until a deadline."""
        # HTTP/1.0, so that the body comes as it is.
        request = ["GET /v1/streams/main/events HTTP/1.0", f"Authorization: Bearer {self._key}"]
        if self._last_id is not None:
            request.append(f"Last-Event-ID: {self._last_id}")
        with socket.create_connection(("127.0.0.1", self._port), timeout=10) as connection:
            connection.sendall("\r\n".join([*request, "", ""]).encode())
            connection.settimeout(0.1)

            def lines(deadline: float) -> Iterator[tuple[str, str]]:
                rest = b""
                while time.monotonic() < deadline:
                    part = b""
                    with suppress(TimeoutError):
                        part = connection.recv(65536)
                        if not part:
                            return
                    *whole, rest = (rest + part).split(b"\n")
                    for line in whole:
                        field, _, value = line.decode().strip().partition(":")
                        if field.startswith("HTTP/") and " 200 " not in line.decode():
                            raise RefusedError(line.decode())
                        yield field, value.strip()

            yield lines


class BySpark:
    """A streaming query with a checkpoint, run to the end of what there is each time."""

    def __init__(self, dsn: str, folder: Path, name: str = "Spark") -> None:
        self.name = name
        self.seen: list[int] = []
        self._folder = folder
        self._console = Console(None)
        self.read(dsn, ())

    def read(self, dsn: str, expected: Collection[int]) -> None:
        flow = {
            "name": "outside",
            "checkpoint": str(self._folder / "checkpoint"),
            "read": {"url": dsn, "stream": "main", "startingOffsets": "earliest"},
            "parquet": str(self._folder / "events"),
        }
        try:
            self._console.do("drain", flows=[flow])
        except NotDoneError as error:
            if "MB0" not in str(error) and "pgmb." not in str(error):
                raise
            raise RefusedError(str(error).splitlines()[0]) from error
        self.seen[:] = [int(payload) for _, (payload,) in files.rows(self._folder / "events", "payload")]

    def close(self) -> None:
        self._console.close()


def _number(text: str) -> int | None:
    """The payload of an event as it is sent."""
    said = json.loads(text)
    if isinstance(said, dict):
        said = said.get("payload", said.get("data"))
    return said if isinstance(said, int) else None
