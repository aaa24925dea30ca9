"""Ways to answer a request, well and badly: see `visits`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain, repeat

from harness.visits import Visit

_HEAD = b"HTTP/1.1 200 OK\r\n"
_DRIBBLE_EVERY = 0.5
_CHUNK = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
_CHUNK_EVERY = 0.01
_failed: set[tuple[str, str]] = set()


def slow(visit: Visit, seconds: float) -> None:
    """204, but late."""
    asyncio.get_running_loop().call_later(seconds, visit.answer, 204)


def refusing(visit: Visit, status: int = 500, headers: tuple[str, ...] = ()) -> None:
    visit.answer(status, *headers)


def failing_once(visit: Visit) -> None:
    """500 to one event in four when it comes for the first time. Its `webhook-id` must be remembered."""
    arrival = visit.arrival
    event = (arrival.path, arrival.headers["webhook-id"])
    if event[1][-1] in "048c" and event not in _failed:
        _failed.add(event)
        visit.answer(500)
    else:
        visit.answer()


def redirecting(visit: Visit, to: str, status: int = 307) -> None:
    visit.answer(status, f"Location: {to}")


def resetting(visit: Visit) -> None:
    """The connection is cut without an answer."""
    visit.end()
    visit.transport.abort()


def silent(visit: Visit) -> None:
    """No answer, ever."""


def babbling(visit: Visit) -> None:
    """What is no HTTP."""
    visit.end()
    visit.transport.write(b"\x00\xff 200 what?\r\n\r\n" * 3)
    visit.transport.close()


def dribbling(visit: Visit) -> None:
    """Headers, one byte at a time, that never end."""
    _go_on(visit, chain((bytes([byte]) for byte in _HEAD + b"X-Long: "), repeat(b"a")), _DRIBBLE_EVERY)


def endless(visit: Visit) -> None:
    """A body that never ends."""
    visit.transport.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    _go_on(visit, repeat(_CHUNK), _CHUNK_EVERY)


def _go_on(visit: Visit, pieces: Iterator[bytes], every: float) -> None:
    if visit.open and not visit.transport.is_closing():
        visit.transport.write(next(pieces))
        asyncio.get_running_loop().call_later(every, _go_on, visit, pieces, every)
