"""Reads the state of the database every few seconds for all viewers, and the doctor's findings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker
from pgmb.doctor import Finding, Level, aexamine
from pgmb.errors import PgmbError, translated
from pgmb.server.tasks import cancel_and_wait

logger = logging.getLogger("pgmb.server.dashboard")

_WATCHED = 2.0
_UNWATCHED = 10.0
_KEPT = 900.0
_MOST_QUEUES = 200
"""Queues kept per sample; only the newest sample has all."""


class Point(msgspec.Struct, frozen=True, gc=False):
    """A queue's values for the charts."""

    waiting: int
    oldest: float | None
    leased: int
    retries: int
    dead: int
    rate: float


class Posted(msgspec.Struct, frozen=True, gc=False):
    """Delivered events and failed attempts per second."""

    delivered: float = 0.0
    failed: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """The state of the database at one time."""

    number: int
    at: float
    """Seconds since 1970, by the database's clock."""
    seen: float
    """By this process's clock."""
    published: dict[str, float]
    """Events per second, by stream."""
    posted: Posted
    """Deliveries to endpoints."""
    busy: dict[str, Posted]
    """Deliveries by active endpoint."""
    queues: list[dict[str, Any]]
    readers: list[dict[str, Any]]
    endpoints: dict[str, Any]
    dispatchers: list[dict[str, Any]]
    marks: dict[str, str]
    """By subject, a value that changes when the page has something new to show."""
    points: dict[str, Point]

    def queue(self, name: str) -> dict[str, Any] | None:
        return next((queue for queue in self.queues if queue["queue"] == name), None)

    @property
    def totals(self) -> dict[str, Any]:
        """The sums over all queues, as a row. A sum is a bound where one of the queues has a bound."""
        sums: dict[str, Any] = {
            field: sum(queue[field] or 0 for queue in self.queues)
            for field in ("rate", "waiting", "leased", "retries", "dead")
        }
        for bound in ("at_least", "at_most"):
            sums[bound] = sorted({field for queue in self.queues for field in queue[bound]})
        return sums

    @property
    def oldest(self) -> float | None:
        ages = [queue["oldest"] for queue in self.queues if queue["oldest"] is not None]
        return max(ages, default=None)


class Sampler:
    """One per process. Runs from `start` to `close`."""

    def __init__(
        self,
        broker: AsyncBroker,
        *,
        watched: float = _WATCHED,
        unwatched: float = _UNWATCHED,
        kept: float = _KEPT,
    ) -> None:
        self._broker = broker
        self._watched = watched
        self._unwatched = unwatched
        self._kept = kept
        self._lock = asyncio.Lock()
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._numbers: dict[str, int] = {}
        self._counted: dict[str, dict[str, Any]] = {}
        self._failing = False
        self.samples: deque[Sample] = deque()
        self._outdated = False
        self.watchers = 0
        self.closed = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dashboard sampler")

    async def close(self) -> None:
        """Stop sampling, and end the viewers' streams."""
        self.leave()
        if self._task is not None:
            await cancel_and_wait(self._task)

    def leave(self) -> None:
        self.closed = True
        self._changed.set()

    @property
    def newest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    async def latest(self, older: float | None = None) -> Sample:
        """A current sample, at most as old as the sampling interval with viewers."""
        most = self._watched if older is None else older
        async with self._lock:
            newest = self.newest
            if newest is None or self._outdated or time.monotonic() - newest.seen > most:
                newest = await self._look()
        return newest

    def outdate(self) -> None:
        """Discard the current sample after a change."""
        self._outdated = True

    @contextmanager
    def watching(self) -> Generator[None]:
        """Sample more often while there are viewers."""
        self.watchers += 1
        self._hurry.set()
        try:
            yield
        finally:
            self.watchers -= 1

    async def following(self, after: int, heartbeat: float) -> AsyncGenerator[Sample | None]:
        """New samples; None after a time without one. Ends with the sampler."""
        while not self.closed:
            newest = self.newest
            if newest is not None and newest.number > after:
                after = newest.number
                yield newest
                continue
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), heartbeat)
            except TimeoutError:
                yield None

    async def _run(self) -> None:
        while True:
            try:
                await self.latest(self._pause() * 0.5)
                self._failing = False
            except (psycopg.Error, PgmbError, PoolTimeout) as error:
                # Logged once, not at every sample.
                if not self._failing:
                    logger.warning("the dashboard cannot read the database: %s", error)
                self._failing = True
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._pause())

    def _pause(self) -> float:
        return self._watched if self.watchers else self._unwatched

    async def _look(self) -> Sample:
        self._outdated = False
        with translated():
            async with (
                self._broker.own_connection() as connection,
                connection.transaction(),
                connection.cursor(row_factory=tuple_row) as cursor,
            ):
                await cursor.execute("set local statement_timeout = '10s'")
                await cursor.execute("select pgmb.sample(%s)", (Jsonb(self._numbers),))
                rows = await cursor.fetchall()
        sample = self._made(rows[0][0])
        self.samples.append(sample)
        while self.samples[0].seen < sample.seen - self._kept:
            self.samples.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return sample

    def _made(self, found: dict[str, Any]) -> Sample:
        before = self.newest
        passed = max(found["at"] - before.at, 0.001) if before else None
        self._numbers = {stream["stream"]: stream["last"] for stream in found["streams"]}
        published = {
            stream["stream"]: stream["published"] / passed if passed else 0.0 for stream in found["streams"]
        }
        endpoints = found["endpoints"]
        posted = _posted(before.endpoints, endpoints, passed) if before and passed else Posted()
        counted = {one["endpoint"]: one for one in found["busy"]}
        busy = {
            name: _posted(self._counted[name], one, passed) if passed and name in self._counted else Posted()
            for name, one in counted.items()
        }
        # Counters start again after an idle time.
        self._counted = counted
        busiest = sorted(found["queues"], key=lambda queue: -(queue["waiting"] + queue["rate"]))
        points = {
            queue["queue"]: Point(
                queue["waiting"],
                queue["oldest"],
                queue["leased"],
                queue["retries"],
                queue["dead"],
                queue["rate"],
            )
            for queue in busiest[:_MOST_QUEUES]
        }
        newest = found["newest"]
        marks = {
            "streams": _mark(self._numbers, found["readers"]),
            "queues": _mark(found["queues"]),
            "dead": _mark(newest["dead"], [queue["dead"] for queue in found["queues"]]),
            "endpoints": _mark(endpoints, newest["attempt"]),
            "audit": _mark(newest["audit"]),
            "always": str(found["at"]),
        }
        return Sample(
            number=before.number + 1 if before else 1,
            at=found["at"],
            seen=time.monotonic(),
            published=published,
            posted=posted,
            busy=busy,
            queues=found["queues"],
            readers=found["readers"],
            endpoints=endpoints,
            dispatchers=found["dispatchers"],
            marks=marks,
            points=points,
        )


def _posted(before: dict[str, Any], after: dict[str, Any], passed: float) -> Posted:
    # Fewer than before: an endpoint was dropped.
    return Posted(
        max(0.0, (after["delivered"] - before["delivered"]) / passed),
        max(0.0, (after["failed"] - before["failed"]) / passed),
    )


def _mark(*values: Any) -> str:
    return f"{zlib.crc32(msgspec.json.encode(values)):x}"


_EXAMINE_EVERY = 30.0


class Health:
    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._at = 0.0
        self._found: list[Finding] = []
        self._examining: asyncio.Task[None] | None = None

    async def findings(self) -> list[Finding]:
        """The latest findings. Only the first caller waits for them."""
        idle = self._examining is None or self._examining.done()
        if idle and time.monotonic() - self._at > _EXAMINE_EVERY:
            self._examining = asyncio.create_task(self._examine(), name="dashboard health")
        if not self._found and self._examining is not None:
            await asyncio.shield(self._examining)
        return self._found

    async def close(self) -> None:
        if self._examining is not None:
            self._examining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._examining

    async def _examine(self) -> None:
        try:
            async with self._broker.own_connection() as connection:
                self._found = await aexamine(connection)
        except (psycopg.Error, PoolTimeout):
            self._found = [Finding("database", Level.FAIL, "the database does not answer")]
        self._at = time.monotonic()
