"""Posting: what a lane holds goes out as requests, and what comes back decides."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pgmb.delivery.breaker import Breaker
from pgmb.delivery.request import build
from pgmb.delivery.schedule import delay_after
from pgmb.delivery.store import Tried
from pgmb.delivery.work import Delivery, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgmb.delivery.client import Attempted, Poster
    from pgmb.delivery.lane import Lane
    from pgmb.delivery.request import Serialiser
    from pgmb.delivery.store import Store

logger = logging.getLogger("pgmb.delivery")

_TOO_MANY: Final = 429
_APART: Final = 0.001

Decision: TypeAlias = "Callable[[Store], Awaitable[Any]]"


class Posting:
    """Requests under way. What they lead to is kept here until the database is told."""

    def __init__(
        self, poster: Poster, clock: Callable[[], float], serialiser: Serialiser | None = None
    ) -> None:
        self.news = asyncio.Event()
        """Set when there is something to tell."""
        self.tried: list[Tried] = []
        self.decisions: list[Decision] = []
        self._poster = poster
        self._clock = clock
        self._serialiser = serialiser
        self._requests: set[asyncio.Task[None]] = set()

    def start(self, lane: Lane) -> None:
        """Begin as many requests as the lane may have under way."""
        for _ in range(lane.startable):
            taken = lane.take()
            if taken is None:
                return
            request = asyncio.create_task(self._run(lane, taken))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    def park(self, lane: Lane, after: float = 0.0) -> None:
        """What waits in a lane waits in the database instead, where it holds up nobody."""
        for one in lane.clear():
            one.lease.failed(Failure(one.name, lane.identity, after, None, False, False))
            lane.behind = True
            self.news.set()

    async def stop(self, grace: float) -> None:
        """Let requests come back for so many seconds, and give up the others."""
        if self._requests:
            await asyncio.wait(self._requests, timeout=grace)
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _run(self, lane: Lane, first: list[Delivery]) -> None:
        """One request after the other, while the lane has some."""
        taken: list[Delivery] | None = first
        while taken is not None:
            endpoint = lane.endpoint
            try:
                events = [one.event for one in taken]
                request = build(endpoint, events, taken[0].attempt, int(time.time()), self._serialiser)
                attempted = await self._poster.post(request, endpoint.timeout, endpoint.keep_response)
            except asyncio.CancelledError:
                self._give_back(lane, taken)
                raise
            except Exception as error:
                # A serialiser's, most likely: as any failure, and nobody else's trouble.
                logger.exception("endpoint %s: no request could be made", endpoint.name)
                self._fail(lane, taken, f"{type(error).__name__}: {error}")
            else:
                self._judge(lane, taken, attempted)
            taken = lane.take()

    def _judge(self, lane: Lane, taken: list[Delivery], attempted: Attempted) -> None:
        if attempted.kind != "delivered" or lane.logs_all:
            self._note(lane, taken, attempted)
        if attempted.kind == "delivered":
            self._delivered(lane, taken)
            return
        if attempted.kind == "gone":
            lane.state = "disabled"
            self.decisions.append(lambda store: store.disable(lane.identity, "410 Gone"))
        elif attempted.retry_after is not None:
            lane.held_until = max(lane.held_until, self._clock() + attempted.retry_after)
        said = filter(None, (attempted.error_class, attempted.detail))
        # One that asks for time answers: that is no reason to trip it.
        self._fail(lane, taken, ": ".join(said), attempted.retry_after, counts=attempted.status != _TOO_MANY)

    def _delivered(self, lane: Lane, taken: list[Delivery]) -> None:
        lane.finished(taken, delivered=True)
        lane.breaker.record(True)
        for one in taken:
            one.lease.delivered(one.name)
            if one.lease.open == 0:
                self.news.set()
        if lane.probing:
            self._end_probe(lane, True, None)

    def _fail(
        self,
        lane: Lane,
        taken: list[Delivery],
        error: str,
        at_least: float | None = None,
        *,
        counts: bool = True,
    ) -> None:
        lane.error = error
        behind = lane.finished(taken, delivered=False)
        after, last = self._next_try(lane, taken[0].attempt, at_least)
        for one in taken:
            one.lease.failed(Failure(one.name, lane.identity, after, error, True, last))
        for one in behind:
            one.lease.left_behind(one.name)
        self.news.set()
        if lane.probing:
            self._end_probe(lane, False, error)
        elif counts:
            lane.breaker.record(False)
            if lane.breaker.tripped and lane.state == "active":
                lane.state = "tripped"
                self.decisions.append(lambda store: store.trip(lane.identity, error))
        if not lane.open:
            self.park(lane, max(0.0, lane.held_until - self._clock()))

    def _next_try(self, lane: Lane, attempt: int, at_least: float | None) -> tuple[float | None, bool]:
        """In how many seconds, None for as the queue says, and whether it is given up instead."""
        schedule = lane.endpoint.retry_after
        if lane.state == "disabled" and lane.shares_queue:
            return None, True
        if schedule is None:
            return at_least, False
        after = delay_after(schedule, attempt, random.random)
        if after is None:
            return None, True
        # Two batches that fail at once must not be due at the very same moment: they would come again as one.
        return max(after, at_least or 0.0) + random.random() * _APART, False  # noqa: S311

    def _end_probe(self, lane: Lane, succeeded: bool, reason: str | None) -> None:
        lane.probing = False
        if succeeded:
            lane.state = "active"
            lane.breaker = Breaker(self._clock)
            lane.behind = True
        self.decisions.append(lambda store: store.end_probe(lane.identity, succeeded, reason))
        self.news.set()

    def _give_back(self, lane: Lane, taken: list[Delivery]) -> None:
        for one in [*taken, *lane.abandoned(taken)]:
            one.lease.failed(Failure(one.name, lane.identity, 0.0, None, False, False))

    def _note(self, lane: Lane, taken: list[Delivery], attempted: Attempted) -> None:
        for one in taken:
            event = one.event
            self.tried.append(
                Tried(
                    lane.identity,
                    one.seq,
                    event.id,
                    event.topic,
                    one.attempt,
                    attempted.status,
                    attempted.latency,
                    attempted.error_class,
                    attempted.detail,
                    attempted.response,
                )
            )
