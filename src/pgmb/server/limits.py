"""How much one may ask for: sizes, rates, connections."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import msgspec
from starlette.requests import Request

from pgmb.server.problems import Problem


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process. Those that run side by side each have their own."""

    body: int = 4 << 20
    """Bytes of a request."""
    events: int = 10_000
    """Events of a request, published or received."""
    requests_per_second: float = 500.0
    """Of one key; of one address without a key."""
    burst: float = 1000.0
    long_polls: int = 1000
    """Requests that wait for events, at a time."""
    clients: int = 10_000
    """Readers of server-sent events, at a time."""
    replay_events: int = 100_000
    """How many events a reader may be behind and still be served the rest of them."""
    replay_age: float = 24 * 3600.0
    """How old a position it may come back with, in seconds."""
    pending_events: int = 1000
    """Events that wait for a reader, before it is dropped and has to come back."""
    pending_bytes: int = 1 << 20


class Rates:
    """Token buckets, by whoever asks. The least recent are forgotten: a bucket that is full says nothing."""

    def __init__(
        self,
        per_second: float,
        burst: float,
        *,
        most: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._most = most
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, who: Hashable) -> None:
        """Counts a request, or refuses it."""
        now = self._clock()
        left, at = self._buckets.pop(who, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        allowed = left >= 1
        self._buckets[who] = (left - 1 if allowed else left, now)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = max(1, round((1 - left) / self._per_second))
            raise Problem(429, "too_many_requests", "too many requests", headers={"Retry-After": str(wait)})


async def read_body(request: Request, most: int) -> bytes:
    """The body, unless it is larger than it may be: then no more of it is read."""
    declared = request.headers.get("content-length", "")
    # More digits than this no integer is made of.
    if declared.isascii() and declared.isdecimal() and (len(declared) > 1000 or int(declared) > most):
        raise too_large(most)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise too_large(most)
        parts.append(part)
    return b"".join(parts)


def too_large(most: int) -> Problem:
    return Problem(413, "too_large", f"a request may have {most} bytes")
