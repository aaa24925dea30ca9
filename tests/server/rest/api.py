"""The REST interface without a network, and clients with keys."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from pgmb.server.application import Application
from pgmb.server.limits import Limits
from pgmb.server.rest import routes
from tests.server.asking import asking, bearer, make_key


class Api:
    """A client of an application, and what it asks with a key or another."""

    def __init__(self, client: httpx.AsyncClient, dsn: str, key: str) -> None:
        self.client = client
        self.dsn = dsn
        self.key = key

    def make_key(self, name: str, *scopes: str) -> str:
        return make_key(self.dsn, name, *scopes)

    async def ask(self, method: str, path: str, *, key: str | None = "", **options: Any) -> httpx.Response:
        """With the key that may do all, another one, or None for none."""
        headers: dict[str, Any] = {} if key is None else bearer(key or self.key)
        headers.update(options.pop("headers", {}))
        return await self.client.request(method, path, headers=headers, **options)

    async def done(self, method: str, path: str, **options: Any) -> Any:
        """The answer's JSON: it must be one."""
        answer = await self.ask(method, path, **options)
        assert answer.is_success, (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def refused(self, method: str, path: str, **options: Any) -> tuple[int, str]:
        """The status and the code of a problem document: it must be one."""
        return problem(await self.ask(method, path, **options))

    async def publish(self, *payloads: Any, topic: str = "a.b", stream: str = "main") -> list[str]:
        events = [{"topic": topic, "payload": payload} for payload in payloads]
        answer = await self.done("POST", f"/v1/streams/{stream}/events", json={"events": events})
        ids: list[str] = answer["ids"]
        return ids

    async def receive(self, queue: str = "q", **asked: Any) -> Any:
        return await self.done("POST", f"/v1/queues/{queue}/receive", json=asked)


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["title"]
    return answer.status_code, document["code"]


@asynccontextmanager
async def opened(dsn: str, limits: Limits | None = None, max_size: int = 10) -> AsyncGenerator[Api]:
    """Started, with a key that may do all."""
    application = Application(dsn, parts=[routes], limits=limits, max_size=max_size)
    async with asking(application) as client:
        yield Api(client, dsn, make_key(dsn, "operator", "operate"))
