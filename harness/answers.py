"""Answers of a `harness.receiver`, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain, repeat

from harness.receiver import Answer, Exchange, response

_HEAD = b"HTTP/1.1 200 OK\r\n"
_CHUNK = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
_failed: set[tuple[str, str]] = set()

OK = response(200)


def saying(*parts: bytes) -> Answer:
    """Sends these bytes, and keeps the connection."""

    async def answer(exchange: Exchange) -> None:
        for part in parts:
            await exchange.send(part)

    return answer


async def slow(exchange: Exchange, seconds: float) -> int:
    """204, but late."""
    await asyncio.sleep(seconds)
    return 204


def answering(exchange: Exchange, status: int, headers: tuple[str, ...] = (), body: bytes = b"") -> None:
    exchange.answer(status, *headers, body=body)


def refusing(exchange: Exchange, containing: bytes) -> int:
    """200, but 500 for a body that contains these bytes."""
    return 500 if containing in exchange.request.body else 200


def failing_once(exchange: Exchange) -> int:
    """500 to one event in four when it comes for the first time. Its `webhook-id` must be kept."""
    request = exchange.request
    event = (request.path, request.headers["webhook-id"])
    if event[1][-1] in "048c" and event not in _failed:
        _failed.add(event)
        return 500
    return 204


def redirecting(exchange: Exchange, to: str, status: int = 307) -> None:
    exchange.answer(status, f"Location: {to}")


def resetting(exchange: Exchange) -> None:
    """The connection is cut without an answer."""
    exchange.end()
    exchange.transport.abort()


def silent(exchange: Exchange) -> None:
    """No answer, ever."""


def babbling(exchange: Exchange) -> None:
    """Something that is not HTTP."""
    exchange.end()
    exchange.transport.write(b"\x00\xff 200 what?\r\n\r\n" * 3)
    exchange.transport.close()


async def dribbling(exchange: Exchange) -> None:
    """Headers, one byte at a time, that never end."""
    await _go_on(exchange, chain((bytes([byte]) for byte in _HEAD + b"X-Long: "), repeat(b"a")), 0.5)


async def endless(exchange: Exchange) -> None:
    """A body that never ends."""
    await exchange.send(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    await _go_on(exchange, repeat(_CHUNK), 0.01)


async def _go_on(exchange: Exchange, pieces: Iterable[bytes], every: float) -> None:
    for piece in pieces:
        await exchange.send(piece)
        await asyncio.sleep(every)
