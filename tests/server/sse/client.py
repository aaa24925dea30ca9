"""A client of server-sent events that shows every field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import psycopg

from pgmb._core.keys import KEY, digest, generate

PATIENCE = 30.0
EVENTS = "/v1/streams/main/events"


def publish(db: psycopg.Connection[Any], *numbers: int, topic: str = "t", stream: str = "main") -> None:
    for number in numbers:
        db.execute("select pgmb.publish(%s, %s, stream => %s)", [topic, json.dumps(number), stream])


def make_key(db: psycopg.Connection[Any], *scopes: str, name: str = "k") -> str:
    key = generate(KEY)
    db.execute("select pgmb.create_api_key(%s, %s, %s)", [name, digest(key), list(scopes)])
    return key


class Got(NamedTuple):
    """An event as the client dispatched it."""

    id: str
    event: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Client:
    """Connects, and reads events by the rules of the specification."""

    def __init__(
        self,
        port: int,
        path: str,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,
    ):
        asked = {name: value for name, value in query.items() if value is not None}
        self._target = path + ("?" + urlencode(asked, doseq=True) if asked else "")
        self._port = port
        self._headers = dict(headers or {})
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.status = 0
        self.answered: dict[str, str] = {}
        self.got: list[Got] = []
        self.last_id = ""
        self.retry: int | None = None
        self.comments = 0
        self.body = b""
        self.ended = asyncio.Event()
        self._news = asyncio.Event()
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 16)
        lines = [
            f"GET {self._target} HTTP/1.1",
            "Host: localhost",
            *(f"{k}: {v}" for k, v in self._headers.items()),
        ]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(head[0].split()[1])
        self.answered = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.writer.close()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not done():
                assert not self.ended.is_set(), (self.status, self.body[-500:])
                self._news.clear()
                await self._news.wait()

    async def events(self, count: int) -> list[Got]:
        """So many, whatever they are."""
        await self.until(lambda: len(self.got) >= count)
        return self.got

    async def numbers(self, count: int) -> list[Any]:
        """The payloads of so many events."""
        await self.until(lambda: len(self.messages) >= count)
        return self.messages

    @property
    def messages(self) -> list[Any]:
        return [got.json["payload"] for got in self.got if got.event != "reset"]

    async def _read(self) -> None:
        buffer = b""
        try:
            async for part in self._parts():
                buffer += part
                self.body += part
                *blocks, buffer = buffer.split(b"\n\n")
                for block in blocks:
                    self._dispatch(block.decode())
                self._news.set()
        finally:
            self.ended.set()
            self._news.set()

    async def _parts(self) -> AsyncGenerator[bytes]:
        if self.answered.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(self.answered.get("content-length", "0")))
            return
        while True:
            try:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                chunk = await self.reader.readexactly(size + 2)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if size == 0:
                return
            yield chunk[:-2]

    def _dispatch(self, block: str) -> None:
        data: list[str] = []
        event = "message"
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "":
                self.comments += 1
            elif field == "id":
                self.last_id = value
            elif field == "event":
                event = value
            elif field == "data":
                data.append(value)
            elif field == "retry":
                self.retry = int(value)
            else:
                raise AssertionError(f"a field that nobody sent: {line!r}")
        if data:
            self.got.append(Got(self.last_id, event, "\n".join(data)))
