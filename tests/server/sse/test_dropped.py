"""A reader that is dropped before it joined keeps its place, on any ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest

from pgmb.server import sse
from pgmb.server.application import Application
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import ResumeToken
from pgmb.server.sse.matching import Entry
from pgmb.server.sse.replay import Replay
from pgmb.server.sse.tail import Tail
from tests.server.sse.client import publish


async def test_a_client_that_is_dropped_while_it_resumes_gets_no_newer_id(
    dsn: str, key: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dropped(
        _: Replay, tail: Tail, reader: Reader, token: ResumeToken
    ) -> AsyncGenerator[list[Entry]]:
        reader.drop()
        yield []

    monkeypatch.setattr(Replay, "catch_up", dropped)
    publish(db, 1)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(30)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/streams/main/events",
        "raw_path": b"/v1/streams/main/events",
        "query_string": b"last_event_id=earliest",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "client": ("127.0.0.1", 1),
    }
    app = Application(dsn, parts=[sse.routes])
    async with app.lifespan(), asyncio.timeout(10):
        await app(scope, receive, send)
    assert b"retry: " in b"".join(sent)
    assert b"id: " not in b"".join(sent)
