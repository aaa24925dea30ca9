"""What arrives before anybody knows whose request it is has a size and a time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

import pgmb
from pgmb.services import Http, HttpSettings, http_server

TIMED: dict[str, Any] = {"head_within": 4.0} if hasattr(HttpSettings(), "head_within") else {}


@pytest.fixture
async def port(dsn: str) -> AsyncGenerator[int]:
    async with await pgmb.aconnect(dsn) as broker:
        role = Http(dsn, HttpSettings(port=0, finish_within=1.0, **TIMED))
        await role.turn(broker)
        yield int(role.url.rpartition(":")[2])
        await role.close(broker)


async def _ended(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def test_600_half_open_requests_are_closed_and_others_are_answered(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(600)]
    for _, writer in opened[::2]:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: pgmb\r\nX-Slow: ")
    # More than fit: the oldest had to go at once, unless opening so many took longer than a head may take.
    assert (await asyncio.wait_for(_ended(opened[1][0]), 20))[9:12] in (b"503", b"408")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        assert (await client.get("/livez")).status_code == 200
    answers = await asyncio.wait_for(asyncio.gather(*[_ended(reader) for reader, _ in opened]), 20)
    assert {answer[9:12] for answer in answers[3::2]} <= {b"503", b"408"}
    # What was sent to a closed connection resets it, and the answer may be lost.
    assert {answer[9:12] for answer in answers[::2]} <= {b"503", b"408", b""}
    for _, writer in opened:
        writer.close()


async def test_a_head_that_trickles_in_is_closed(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ended = asyncio.ensure_future(_ended(reader))
    writer.write(b"GET /livez HTTP/1.1\r\nHost: pgmb\r\n\r\n")
    writer.write(b"GET /livez HTTP/1.1\r\n")
    async with asyncio.timeout(20):
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X: y\r\n")
            await asyncio.sleep(0.1)
    assert b"HTTP/1.1 408 " in ended.result()
    writer.close()


@pytest.mark.parametrize("kind", ["one field", "many fields", "the address"])
async def test_a_head_of_60_mb_is_refused_when_64_kb_have_come(port: int, kind: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer.write(b"GET /livez" if kind == "the address" else b"GET /livez HTTP/1.1\r\nHost: pgmb\r\nX: ")
    part = b"X: " + b"y" * 1000 + b"\r\n" if kind == "many fields" else b"y" * 1005
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 60 << 20 and not reader.at_eof():
            writer.write(part * 100)
            sent += len(part) * 100
            await writer.drain()
    writer.close()
    assert sent < 30 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10


async def test_heads_that_are_too_large_or_have_too_many_fields_are_431_in_one_piece(port: int) -> None:
    for head in (b"X: " + b"y" * (65 << 10) + b"\r\n", b"X: y\r\n" * 300):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/keys HTTP/1.1\r\nHost: pgmb\r\nContent-Length: 3\r\n" + head + b"\r\nabc")
        answer = await asyncio.wait_for(_ended(reader), 20)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_body_that_never_comes_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_WITHIN_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /ui/login HTTP/1.1\r\nHost: pgmb\r\nContent-Length: 1000\r\n")
    writer.write(b"Content-Type: application/x-www-form-urlencoded\r\n\r\nkey=")
    assert await asyncio.wait_for(_ended(reader), 20) == b""
    writer.close()


async def test_what_stays_open_after_its_request_has_come_is_left_alone(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        for _ in range(3):
            assert (await client.get("/livez")).status_code == 200
            await asyncio.sleep(1.0)
        assert (await client.post("/v1/keys", content=b"x" * 300_000)).status_code == 401
