"""How much one may ask for: sizes, rates, connections."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Mapping
from contextlib import asynccontextmanager, contextmanager

import msgspec
from starlette.requests import Request

from pgmb.server.problems import Problem


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one process. Each process counts for itself."""

    body: int = 4 << 20
    """Bytes per request."""
    events: int = 10_000
    """Events per request, published or received."""
    requests_per_second: float = 500.0
    """Per key; without a key, per address."""
    burst: float = 1000.0
    long_polls: int = 1000
    """Concurrent requests that wait for events, shared among the keys."""
    clients: int = 10_000
    """Concurrent readers of server-sent events, shared among the keys."""
    replay_events: int = 100_000
    """Events that a returning reader may be behind."""
    replay_age: float = 24 * 3600.0
    """Maximum age of a returning reader's position, in seconds."""
    pending_events: int = 1000
    """Events that may be pending for a reader before it is disconnected."""
    pending_bytes: int = 1 << 20


def has_place(held: Mapping[Hashable, int], who: Hashable, number: int, taken: int | None = None) -> bool:
    """Whether one of the places that clients share is free for this one, by how many each holds.

    The last tenth is for clients that hold less than an equal share of it. So a few clients do not take all
    places, and one alone may still use nearly all of them.
    """
    taken = sum(held.values()) if taken is None else taken
    if taken < number - number // 10:
        return True
    clients = len(held) + (who not in held)
    return taken < number and held.get(who, 0) < max(1, number // 10 // clients)


class Places:
    """Places that clients share (`has_place`)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: dict[Hashable, int] = {}
        self._taken = 0

    def free(self, who: Hashable) -> bool:
        """Whether there is a place for this client."""
        return has_place(self._held, who, self._number, self._taken)

    @contextmanager
    def holding(self, who: Hashable) -> Generator[None]:
        """Hold a place. Ask `free` first."""
        self._taken += 1
        self._held[who] = self._held.get(who, 0) + 1
        try:
            yield
        finally:
            self._taken -= 1
            self._held[who] -= 1
            if not self._held[who]:
                del self._held[who]


class FairTurns:
    """A number of turns at once. Clients that wait get theirs in rotation, however many each waits for."""

    def __init__(self, number: int, most_waiting: int = 100) -> None:
        self._free = max(1, number)
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncGenerator[None]:
        """Wait for a turn, and take it. Raises Problem 429 if this client waits for too many."""
        if self._free:
            self._free -= 1
        else:
            queue = self._waiting.setdefault(who, deque())
            if len(queue) >= self._most_waiting:
                raise Problem(
                    429, "too_many_requests", "too many requests at once", headers={"Retry-After": "1"}
                )
            future = asyncio.get_running_loop().create_future()
            queue.append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._next()
                raise
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            who, queue = self._waiting.popitem(last=False)
            future = queue.popleft()
            if queue:
                self._waiting[who] = queue
            if not future.done():
                future.set_result(None)
                return
        self._free += 1


class Rates:
    """Token buckets by client. The least recently used are dropped: they are full again anyway."""

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
        """Count a request. Raises Problem 429 above the rate."""
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

    def give_back(self, who: Hashable) -> None:
        """Undo a `take`."""
        if who in self._buckets:
            left, at = self._buckets[who]
            self._buckets[who] = (min(self._burst, left + 1), at)


async def read_body(request: Request, most: int) -> bytes:
    """Read the body. Raises Problem 413 as soon as it exceeds the limit."""
    declared = request.headers.get("content-length", "")
    # int() refuses longer texts.
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
    return Problem(413, "too_large", f"a request may have at most {most} bytes")
