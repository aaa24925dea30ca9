"""Looks at everything every few seconds, once for all who watch, and remembers a quarter of an hour."""

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
from pgmb.errors import PgmbError, translated
from pgmb.server.tasks import end

logger = logging.getLogger("pgmb.server.dashboard")

_WATCHED = 2.0
_UNWATCHED = 10.0
_KEPT = 900.0
_MOST_QUEUES = 200
"""Remembered over time; the newest sample has all."""


class Point(msgspec.Struct, frozen=True, gc=False):
    """A queue at one moment, as the charts need it."""

    waiting: int
    oldest: float | None
    leased: int
    retries: int
    dead: int
    rate: float


class Posted(msgspec.Struct, frozen=True, gc=False):
    """Events that were delivered and attempts that failed, a second."""

    delivered: float = 0.0
    failed: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    number: int
    at: float
    """By the database's clock, in seconds since 1970."""
    seen: float
    """By this process's."""
    published: dict[str, float]
    """Events a second, by stream."""
    posted: Posted
    """To endpoints."""
    busy: dict[str, Posted]
    """The same by endpoint, of those that do something."""
    queues: list[dict[str, Any]]
    readers: list[dict[str, Any]]
    endpoints: dict[str, Any]
    dispatchers: list[dict[str, Any]]
    marks: dict[str, str]
    """By subject, what differs once there is something new to show."""
    points: dict[str, Point]

    def queue(self, name: str) -> dict[str, Any] | None:
        return next((queue for queue in self.queues if queue["queue"] == name), None)

    def total(self, field: str) -> float:
        return sum(queue[field] or 0 for queue in self.queues)

    @property
    def oldest(self) -> float | None:
        ages = [queue["oldest"] for queue in self.queues if queue["oldest"] is not None]
        return max(ages, default=None)


class Sampler:
    """One for each process. Runs from `start` to `close`."""

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
        """Also sends those away who watch."""
        self.leave()
        if self._task is not None:
            await end(self._task)

    def leave(self) -> None:
        self.closed = True
        self._changed.set()

    @property
    def newest(self) -> Sample | None:
        return self.samples[-1] if self.samples else None

    async def latest(self, older: float | None = None) -> Sample:
        """A sample of now: at most as old as one is while somebody watches."""
        most = self._watched if older is None else older
        async with self._lock:
            newest = self.newest
            if newest is None or self._outdated or time.monotonic() - newest.seen > most:
                newest = await self._look()
        return newest

    def outdate(self) -> None:
        """Something was changed: what was seen before is not to be shown any more."""
        self._outdated = True

    @contextmanager
    def watching(self) -> Generator[None]:
        """While somebody watches, samples are taken more often."""
        self.watchers += 1
        self._hurry.set()
        try:
            yield
        finally:
            self.watchers -= 1

    async def following(self, after: int, heartbeat: float) -> AsyncGenerator[Sample | None]:
        """Samples as they are taken; None when nothing came for so long. Ends with the sampler."""
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
                # Said once, not every few seconds until it is over.
                if not self._failing:
                    logger.warning("the dashboard cannot look at the database: %s", error)
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
                self._broker.connection() as connection,
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
        # Who did nothing for a while begins anew.
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
    # Fewer than before: one was dropped.
    return Posted(
        max(0.0, (after["delivered"] - before["delivered"]) / passed),
        max(0.0, (after["failed"] - before["failed"]) / passed),
    )


def _mark(*values: Any) -> str:
    return f"{zlib.crc32(msgspec.json.encode(values)):x}"
