"""Delivering: events out of queues, through the endpoints' lanes, over HTTP, and what became of them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pgmb.delivery.directory import Directory
from pgmb.delivery.held import Held
from pgmb.delivery.lane import ROOM
from pgmb.delivery.posting import Posting
from pgmb.delivery.shares import share_of
from pgmb.delivery.store import Did, Store
from pgmb.delivery.wakeups import Wakeups
from pgmb.errors import PgmbError, TimeoutRequired

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgmb._async.broker import AsyncBroker
    from pgmb.delivery.client import Poster
    from pgmb.delivery.request import Serialiser
    from pgmb.delivery.sealing import Key
    from pgmb.delivery.store import Received

logger = logging.getLogger("pgmb.delivery")

HEARTBEAT_EVERY: Final = 2.0
ALIVE_FOR: Final = 10.0
"""As in pgmb.heartbeat: one that was not heard of for so long does not count."""

_RELOAD_EVERY: Final = 1.0
_TAKE_EVERY: Final = 0.1
_CLAIM_EVERY: Final = 0.5
_SOON: Final = 0.005
_AT_REST: Final = 0.25
_RELYING: Final = 1.0
"""Between looks where a listener announces news: retries that fall due are not announced."""
_SMALLEST: Final = 16
_LARGEST: Final = 500
"""Events that are asked for at once: fewer where that was more than the lanes took."""
_FEW: Final = 32
"""So many lanes are looked at one by one before their queue is asked."""
_MOST_HELD: Final = 10_000
"""Deliveries in this process at a time, of a queue with more lanes."""
_TROUBLED: Final = 5.0
_PROBE_LATITUDE: Final = 5.0


class Dispatch:
    """One process's part in delivering. `turn` is what is done in the database; requests run meanwhile."""

    def __init__(
        self,
        poster: Poster,
        key: Key | None = None,
        *,
        lease_for: float = 10.0,
        serialiser: Serialiser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = uuid4()
        self._lease_for = lease_for
        self._clock = clock
        self._directory = Directory(key, clock)
        self._posting = Posting(poster, clock, serialiser)
        self._held = Held(self._posting, clock, lease_for)
        self._wakeups = Wakeups(self._posting.news)
        self._stopping = False
        self._alive: list[str] = []
        self._heard_at = float("-inf")
        self._joins_at: float | None = None
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._batches: dict[str, int] = {}
        self._timed: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether anything that was taken is not settled yet."""
        return len(self._held) > 0

    async def turn(self, broker: AsyncBroker) -> None:
        """Settle what came back, and take what there is room for."""
        async with broker.connection() as connection:
            store = Store(connection, self._lease_for)
            await self._decide(store)
            await self._held.report(store)
            if self._is_due("heartbeat", HEARTBEAT_EVERY):
                await self._heartbeat(store)
            if self._is_due("reload", _RELOAD_EVERY):
                await self._reload(store)
                await self._probe(store)
                self._wakeups.follow(broker, {feeding.stream for feeding in self._directory.queues})
            await self._held.extend(store)
            if self._clock() > self._heard_at + ALIVE_FOR:
                # The others have taken this one's share by now.
                self._alive = []
                self._divide()
            await self._take_requests(store)
            await self._claim(store)
            await self._receive(store)

    async def wait(self) -> None:
        """Until something came back or there is reason to look again."""
        due = min((at for what, at in self._due.items() if what != "take" or len(self._held)), default=0.0)
        pause = max(0.0, min(due - self._clock(), _RELYING))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._posting.news.wait(), pause)
        self._posting.news.clear()

    async def stop(self, broker: AsyncBroker, grace: float = 20.0) -> None:
        """Take nothing more, let requests come back, and give the rest back."""
        self._stopping = True
        await self._wakeups.close()
        for lane in self._directory.lanes.values():
            self._posting.park(lane)
        await self._posting.stop(grace)
        for lane in self._directory.lanes.values():
            self._posting.park(lane)
        async with broker.connection() as connection:
            store = Store(connection, self._lease_for)
            await self._decide(store)
            await self._held.report(store, everything=True)
            await self._heartbeat(store)
            await store.depart(self.id)

    def _is_due(self, what: str, every: float) -> bool:
        now = self._clock()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    async def _decide(self, store: Store) -> None:
        decisions = self._posting.decisions
        while decisions:
            await decisions[0](store)
            del decisions[0]

    async def _heartbeat(self, store: Store) -> None:
        did: list[Did] = []
        for identity, lane in self._directory.lanes.items():
            if lane.delivered or lane.failed:
                did.append(Did(identity, lane.delivered, lane.failed, lane.error))
                lane.delivered, lane.failed, lane.error = 0, 0, None
        self._alive = await store.heartbeat(self.id, socket.gethostname(), os.getpid(), did)
        self._heard_at = self._clock()
        if self._joins_at is None:
            # Those that live already have to hear of this one before it takes its share.
            alone = self._alive == [str(self.id)]
            self._joins_at = self._heard_at + (0.0 if alone else 2 * HEARTBEAT_EVERY)
        self._divide()

    def _divide(self) -> None:
        joined = self._joins_at is not None and self._clock() >= self._joins_at
        alive = tuple(self._alive) if joined else ()
        for identity, lane in self._directory.lanes.items():
            cut = (alive, lane.endpoint.max_in_flight)
            if lane.cut != cut:
                lane.cut = cut
                lane.share = share_of(lane.endpoint.max_in_flight, identity, str(self.id), alive)
                self._posting.start(lane)

    async def _reload(self, store: Store) -> None:
        dropped = await self._directory.reload(store)
        self._divide()
        for lane in (*self._directory.lanes.values(), *dropped):
            if lane.waiting and not lane.open and not lane.probing:
                self._posting.park(lane)

    async def _probe(self, store: Store) -> None:
        tripped = {
            identity: lane.endpoint.timeout + _PROBE_LATITUDE
            for identity, lane in self._directory.lanes.items()
            if lane.state == "tripped" and not lane.probing and lane.share > 0 and not lane.busy
        }
        if not tripped or self._stopping:
            return
        for identity in await store.probe(tripped):
            lane = self._directory.lanes[identity]
            lane.probing = True
            queue = self._directory.own.get(identity)
            if queue is None:
                self._held.claim(await store.claim(1, 0, {identity: 1}), self._directory.lanes)
            else:
                received = await self._received(store, queue, lane.endpoint.batch)
                self._held.receive(received, self._directory.lanes)
            if not lane.busy:
                # Nothing is due that could tell: the next event will.
                lane.probing = False
                await store.end_probe(identity, None, None)

    async def _take_requests(self, store: Store) -> None:
        if not self._directory.limited or not self._is_due("take", _TAKE_EVERY):
            return
        wanted = {
            identity: wants for identity, lane in self._directory.limited.items() if (wants := lane.wants) > 0
        }
        if not wanted:
            return
        for identity, given in (await store.take_requests(wanted)).items():
            lane = self._directory.lanes[identity]
            lane.allow(given)
            self._posting.start(lane)

    async def _claim(self, store: Store) -> None:
        shared = self._directory.shared
        if self._stopping or not shared or not self._is_due("claim", _CLAIM_EVERY):
            return
        # Of ten thousand lanes few are other than empty: those are named.
        rooms = {name: room for name, lane in shared.items() if (room := lane.room) != ROOM}
        claimed = await store.claim(_LARGEST, ROOM, rooms)
        if claimed:
            self._due["claim"] = self._clock() + 2 * _SOON
        got = Counter(one.endpoint for one in claimed)
        if len(claimed) < _LARGEST:
            for identity, lane in shared.items():
                room = rooms.get(identity, ROOM)
                if room:
                    lane.behind = got[identity] >= room
        self._held.claim(claimed, self._directory.lanes)

    async def _receive(self, store: Store) -> None:
        news = self._wakeups.heard()
        for queue, identity, stream in self._directory.queues:
            most = 0 if self._stopping else self._room_for(queue, identity)
            look = f"queue {queue}"
            if stream in news:
                self._due.pop(look, None)
                self._pauses.pop(look, None)
            if most < 1:
                # News will come when there is room again.
                self._due.pop(look, None)
                continue
            if not self._is_due(look, _SOON):
                continue
            try:
                received = await self._received(store, queue, most)
            except PgmbError as error:
                # Dropped meanwhile, or what it asks for cannot be asked: nobody else's trouble.
                logger.warning("queue %s: %s", queue, error)
                self._due[look] = self._clock() + _TROUBLED
                continue
            longest = _RELYING if self._wakeups.relies_on(stream) else _AT_REST
            pause = 0.0 if received else min(longest, 2 * self._pauses.get(look, _SOON / 2))
            self._pauses[look] = max(pause, _SOON / 2)
            self._due[look] = self._clock() + pause
            overflowed = self._held.receive(received, self._directory.lanes)
            if overflowed:
                self._batches[queue] = max(_SMALLEST, most // 2)
            elif len(received) == most:
                self._batches[queue] = min(_LARGEST, most * 2)

    async def _received(self, store: Store, queue: str, most: int) -> list[Received]:
        try:
            return await store.receive(queue, most, queue in self._timed)
        except TimeoutRequired:
            # It asks by an SQL condition. Few do, and the others are received in one round trip.
            self._timed.add(queue)
            return await store.receive(queue, most, True)

    def _room_for(self, queue: str, identity: str | None) -> int:
        """How many events to ask a queue for: none while what it feeds has enough."""
        if identity is not None:
            lane = self._directory.lanes[identity]
            # In one go rather than in many small ones.
            return min(lane.room, _LARGEST) if lane.room >= lane.waiting else 0
        lanes = self._directory.sharing.get(queue, [])
        batch = self._batches.get(queue, ROOM)
        if self._joins_at is None or self._clock() < self._joins_at or not self._alive:
            return 0
        if len(lanes) > _FEW:
            return batch if self._held.deliveries < _MOST_HELD else 0
        room = max((lane.room for lane in lanes if lane.room >= lane.waiting), default=0)
        if room == 0 and any(lane.state == "disabled" for lane in lanes):
            # Events go past those that are disabled, and wait for the others.
            return 0 if any(lane.open for lane in lanes) else batch
        return min(room, batch)
