"""Delivering: events out of queues, through the endpoints' lanes, over HTTP, and what became of them back."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pgmb.delivery.breaker import Breaker
from pgmb.delivery.directory import Directory
from pgmb.delivery.outcomes import judge
from pgmb.delivery.request import build
from pgmb.delivery.schedule import delay_after
from pgmb.delivery.shares import share_of
from pgmb.delivery.store import Did, Store, Tried
from pgmb.delivery.work import Delivery, Failure, Lease, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pgmb._async.broker import AsyncBroker
    from pgmb.delivery.client import Attempted, Poster
    from pgmb.delivery.lane import Lane
    from pgmb.delivery.sealing import Key

logger = logging.getLogger("pgmb.delivery")

HEARTBEAT_EVERY: Final = 2.0
ALIVE_FOR: Final = 10.0
"""As in pgmb.heartbeat: one that was not heard of for so long does not count."""

_LEASE_FOR: Final = 10.0
_REPORT_EVERY: Final = 0.25
_RELOAD_EVERY: Final = 1.0
_TAKE_EVERY: Final = 0.1
_CLAIM_EVERY: Final = 0.25
_AT_REST: Final = 0.5
_LARGEST_BATCH: Final = 500


class Dispatch:
    """One process's part in delivering. `turn` does what is to be done in the database; requests run meanwhile."""

    def __init__(
        self,
        poster: Poster,
        key: Key | None = None,
        *,
        lease_for: float = _LEASE_FOR,
        clock: Callable[[], float] = time.monotonic,
        join_after: float = 2 * HEARTBEAT_EVERY,
    ) -> None:
        self.id = uuid4()
        self._poster = poster
        self._lease_for = lease_for
        self._clock = clock
        self._directory = Directory(key, clock)
        self._leases: dict[str, Lease] = {}
        self._reports: list[Report] = []
        self._tried: list[Tried] = []
        self._decisions: list[Callable[[Store], Any]] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._stopping = False
        self._alive: list[str] = []
        self._heard_at = float("-inf")
        # Those that live already have to notice this one before it takes its share.
        self._joined_at: float | None = None
        self._join_after = join_after
        self._due = {"heartbeat": 0.0, "reload": 0.0, "take": 0.0, "claim": 0.0, "extend": 0.0}
        self._empty: dict[str, float] = {}
        self._pauses: dict[str, float] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._leases)

    async def turn(self, broker: AsyncBroker) -> None:
        """Settle what came back, and take what there is room for."""
        async with broker.connection() as connection:
            store = Store(connection, self._lease_for)
            await self._decide(store)
            await self._report(store)
            if self._is_due("heartbeat", HEARTBEAT_EVERY):
                await self._heartbeat(store)
            if self._is_due("reload", _RELOAD_EVERY):
                await self._directory.reload(store)
                self._divide()
                await self._probe(store)
            if self._is_due("extend", self._lease_for / 3):
                await self._extend(store)
            if not self._stopping and self._clock() < self._heard_at + ALIVE_FOR:
                await self._take_requests(store)
                await self._claim(store)
                await self._receive(store)

    async def wait(self, longest: float = _AT_REST) -> None:
        """Until something came back or a turn is due."""
        until = min(self._due["take"], self._due["claim"]) if self._leases else self._due["claim"]
        pauses = [at for at in self._empty.values()]
        pause = min([until, *pauses]) - self._clock() if pauses else until - self._clock()
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, min(pause, longest)))
        except TimeoutError:
            return
        finally:
            self._news.clear()

    async def stop(self, broker: AsyncBroker, grace: float = 20.0) -> None:
        """Take nothing more, let requests come back for as long as `grace`, and give the rest back."""
        self._stopping = True
        for lane in self._directory.lanes.values():
            self._park(lane, "the dispatcher stops", after=0.0)
        if self._requests:
            await asyncio.wait(self._requests, timeout=grace)
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        async with broker.connection() as connection:
            store = Store(connection, self._lease_for)
            await self._decide(store)
            await self._report(store, everything=True)
            await self._heartbeat(store)
            await store.depart(self.id)

    def _is_due(self, what: str, every: float) -> bool:
        now = self._clock()
        if now < self._due[what]:
            return False
        self._due[what] = now + every
        return True

    # What other dispatchers need to know, and this one of them.

    async def _heartbeat(self, store: Store) -> None:
        did = []
        for identity, lane in self._directory.lanes.items():
            if lane.delivered or lane.failed:
                did.append(Did(identity, lane.delivered, lane.failed, lane.error))
                lane.delivered = lane.failed = 0
                lane.error = None
        self._alive = await store.heartbeat(self.id, socket.gethostname(), os.getpid(), did)
        self._heard_at = self._clock()
        if self._joined_at is None:
            alone = self._alive == [str(self.id)]
            self._joined_at = self._clock() + (0.0 if alone else self._join_after)
        self._divide()

    def _divide(self) -> None:
        if self._joined_at is None or self._clock() < self._joined_at:
            for lane in self._directory.lanes.values():
                lane.share = 0
            return
        for identity, lane in self._directory.lanes.items():
            lane.share = share_of(lane.endpoint.max_in_flight, identity, str(self.id), self._alive)
            self._start(lane)

    async def _decide(self, store: Store) -> None:
        while self._decisions:
            await self._decisions[0](store)
            del self._decisions[0]

    async def _take_requests(self, store: Store) -> None:
        if not self._is_due("take", _TAKE_EVERY):
            return
        wanted = {
            identity: lane.wants for identity, lane in self._directory.limited.items() if lane.wants > 0
        }
        if not wanted:
            return
        for identity, given in (await store.take_requests(wanted)).items():
            lane = self._directory.lanes[identity]
            lane.allow(given)
            self._start(lane)

    async def _probe(self, store: Store) -> None:
        tripped = {
            identity: lane.endpoint.timeout + 5.0
            for identity, lane in self._directory.lanes.items()
            if lane.state == "tripped" and not lane.probing and lane.share > 0
        }
        if not tripped or self._stopping:
            return
        for identity in await store.probe(tripped):
            lane = self._directory.lanes[identity]
            lane.probing = True
            queue = self._directory.own.get(identity)
            if queue is None:
                taken = self._admit_claimed(await store.claim(1, 0, {identity: 1}))
            else:
                taken = self._admit_received(await store.receive(queue, 1), parking=False)
            if not taken:
                # Nothing waits that could tell: the next event will.
                lane.probing = False
                await store.end_probe(identity, True, None)

    # Taking.

    async def _claim(self, store: Store) -> None:
        if not self._is_due("claim", _CLAIM_EVERY):
            return
        shared = self._directory.shared
        if not shared:
            return
        rooms = {identity: lane.room for identity, lane in shared.items()}
        # Whoever has no lane here yet is not known to be able to take anything.
        claimed = await store.claim(_LARGEST_BATCH, 0, {name: room for name, room in rooms.items() if room})
        got: dict[str, int] = {}
        for one in claimed:
            got[one.endpoint] = got.get(one.endpoint, 0) + 1
        for identity, lane in shared.items():
            if rooms[identity] and len(claimed) < _LARGEST_BATCH:
                lane.behind = got.get(identity, 0) >= rooms[identity]
        self._admit_claimed(claimed)
        if claimed:
            self._due["claim"] = self._clock() + 0.05

    async def _receive(self, store: Store) -> None:
        for queue, identity in self._directory.queues:
            now = self._clock()
            if now < self._empty.get(queue, 0.0):
                continue
            most = self._room_for(identity)
            if most < 1:
                continue
            received = await store.receive(queue, most)
            if received:
                self._empty.pop(queue, None)
                self._pauses.pop(queue, None)
                self._admit_received(received, parking=identity is None)
            else:
                pause = min(_AT_REST, self._pauses.get(queue, 0.0025) * 2)
                self._pauses[queue] = pause
                self._empty[queue] = now + pause

    def _room_for(self, identity: str | None) -> int:
        """How many events to ask a queue for: none while what it feeds has enough."""
        if identity is not None:
            lane = self._directory.lanes.get(identity)
            if lane is None or lane.share < 1:
                return 0
            room = lane.room
            # In one go rather than in many small ones.
            return min(room, _LARGEST_BATCH) if room * 2 >= lane.waiting else 0
        if self._joined_at is None or self._clock() < self._joined_at:
            return 0
        waiting = sum(lane.waiting for lane in self._directory.shared.values())
        return _LARGEST_BATCH if waiting < _LARGEST_BATCH else 0

    def _admit_received(self, received: list[Any], *, parking: bool) -> int:
        lanes = self._directory.lanes
        touched: dict[int, Lane] = {}
        now = self._clock()
        for one in received:
            lease = self._leases.get(one.lease)
            if lease is None:
                lease = self._leases[one.lease] = Lease(one.lease, now, waited=False)
            lease.add(one.seq, len(one.endpoints))
            for identity in one.endpoints:
                lane = lanes.get(identity)
                if lane is None or (
                    parking and (lane.behind or lane.room < 1 or lane.share < 1 or self._stopping)
                ):
                    # It waits in the database, where it holds up nobody.
                    if lane is not None:
                        lane.behind = True
                    lease.failed(Failure(one.seq, identity, 0.0, None, False, False))
                    continue
                lane.put(Delivery(lane, lease, one.seq, one.seq, one.attempt, one.event))
                touched[id(lane)] = lane
            if lease.open == 0:
                self._news.set()
        for lane in touched.values():
            self._start(lane)
        return len(received)

    def _admit_claimed(self, claimed: list[Any]) -> int:
        now = self._clock()
        touched: dict[int, Lane] = {}
        for one in claimed:
            lease = self._leases.get(one.lease)
            if lease is None:
                lease = self._leases[one.lease] = Lease(one.lease, now, waited=True)
            lease.add(one.row, 1)
            lane = self._directory.lanes[one.endpoint]
            lane.put(Delivery(lane, lease, one.row, one.seq, one.attempt, one.event))
            touched[id(lane)] = lane
        for lane in touched.values():
            self._start(lane)
        return len(claimed)

    # Posting.

    def _start(self, lane: Lane) -> None:
        for _ in range(lane.startable):
            taken = lane.take()
            if taken is None:
                return
            request = asyncio.create_task(self._run(lane, taken))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    async def _run(self, lane: Lane, first: list[Delivery]) -> None:
        """Post one request after the other while the lane has some."""
        taken: list[Delivery] | None = first
        while taken is not None:
            try:
                endpoint = lane.endpoint
                request = build(
                    endpoint, [one.event for one in taken], taken[0].attempt, int(time.time())
                )
                attempted = await self._poster.post(request, endpoint.timeout, endpoint.keep_response)
            except asyncio.CancelledError:
                self._give_back(lane, taken)
                raise
            except Exception as error:
                logger.exception("endpoint %s: a request could not be made", lane.endpoint.name)
                self._fail(lane, taken, f"{type(error).__name__}: {error}", None)
            else:
                self._judge(lane, taken, attempted)
            taken = lane.take()

    def _judge(self, lane: Lane, taken: list[Delivery], attempted: Attempted) -> None:
        verdict = judge(attempted)
        endpoint = lane.endpoint
        if verdict.kind != "delivered" or lane.logs_all:
            self._note(lane, taken, attempted)
        if verdict.kind == "delivered":
            lane.finished(taken, delivered=True)
            lane.breaker.record(True)
            for one in taken:
                one.lease.delivered(one.name)
                if one.lease.open == 0:
                    self._news.set()
            if lane.probing:
                self._end_probe(lane, True, None)
            return
        if verdict.kind == "gone":
            lane.state = "disabled"
            self._decisions.append(lambda store: store.disable(str(endpoint.id), "410 Gone"))
        elif verdict.kind == "throttled":
            lane.held_until = max(lane.held_until, self._clock() + verdict.retry_after)
        self._fail(lane, taken, verdict.error, verdict.retry_after if verdict.kind == "throttled" else None)

    def _fail(self, lane: Lane, taken: list[Delivery], error: str, at_least: float | None) -> None:
        endpoint = lane.endpoint
        lane.error = error
        behind = lane.finished(taken, delivered=False)
        after: float | None = None
        last = lane.state == "disabled" and str(endpoint.id) in self._directory.shared
        if endpoint.retry_after is not None:
            after = delay_after(endpoint.retry_after, taken[0].attempt, random.random)
            last = last or after is None
        if at_least is not None:
            after = max(at_least, after or 0.0)
        for one in taken:
            one.lease.failed(Failure(one.name, str(endpoint.id), after, error, True, last))
        for one in behind:
            one.lease.left_behind(one.name)
        self._news.set()
        if lane.probing:
            self._end_probe(lane, False, error)
        else:
            lane.breaker.record(False)
            if lane.breaker.state != "closed" and lane.state == "active":
                lane.state = "tripped"
                self._decisions.append(lambda store: store.trip(str(endpoint.id), error))
        if not lane.open:
            self._park(lane, None, after=max(0.0, lane.held_until - self._clock()))

    def _end_probe(self, lane: Lane, succeeded: bool, reason: str | None) -> None:
        lane.probing = False
        identity = str(lane.endpoint.id)
        if succeeded:
            lane.state = "active"
            lane.breaker = Breaker(self._clock)
            lane.behind = True
        self._decisions.append(lambda store: store.end_probe(identity, succeeded, reason))
        self._news.set()

    def _give_back(self, lane: Lane, taken: Iterable[Delivery]) -> None:
        taken = list(taken)
        behind = lane.finished(taken, delivered=True)
        for one in [*taken, *behind]:
            one.lease.failed(Failure(one.name, str(lane.endpoint.id), 0.0, None, False, False))

    def _park(self, lane: Lane, error: str | None, after: float) -> None:
        """What waits here waits in the database instead."""
        parked = False
        for one in lane.clear():
            parked = True
            one.lease.failed(Failure(one.name, str(lane.endpoint.id), after, error, False, False))
        if parked:
            lane.behind = True
            self._news.set()

    # Settling.

    def _note(self, lane: Lane, taken: list[Delivery], attempted: Attempted) -> None:
        for one in taken:
            self._tried.append(
                Tried(
                    str(lane.endpoint.id),
                    one.seq,
                    one.event.id,
                    one.event.topic,
                    one.attempt,
                    attempted.status,
                    attempted.latency,
                    attempted.error_class,
                    attempted.detail,
                    attempted.response,
                )
            )

    async def _report(self, store: Store, *, everything: bool = False) -> None:
        now = self._clock()
        ended = [lease for lease in self._leases.values() if lease.open == 0]
        some = [
            lease
            for lease in self._leases.values()
            if lease.open and (everything or now >= lease.reported_at + _REPORT_EVERY)
        ]
        self._reports += [report for lease in (*ended, *some) if (report := lease.report(now)) is not None]
        for lease in ended:
            del self._leases[lease.id]
        reports, tried = len(self._reports), len(self._tried)
        if not reports and not tried:
            return
        # Kept until the database has them, however long it is away.
        lost = await store.settle(self._reports[:reports], self._tried[:tried])
        del self._reports[:reports], self._tried[:tried]
        if lost:
            logger.warning("%d leases were lost before they were settled: what they held is posted again", lost)

    async def _extend(self, store: Store) -> None:
        old = self._clock() - self._lease_for / 3
        held = [lease for lease in self._leases.values() if lease.open and lease.taken_at < old]
        if held:
            await store.extend(
                [lease.id for lease in held if not lease.waited], [lease.id for lease in held if lease.waited]
            )

