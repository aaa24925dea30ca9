"""The dispatcher's loop: lease events, hand them to the endpoints' lanes, settle the leases.

`DispatchLoop.turn` does the database work. Requests run in between, with no transaction open.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import psycopg

from pgmb._core.batch_limit import BatchLimit
from pgmb._core.wire import BATCH_BYTES
from pgmb.errors import PgmbError, TimeoutRequired
from pgmb.webhooks.lanes import PROBED, ROOM, EndpointDirectory, Lane
from pgmb.webhooks.sender import Sender
from pgmb.webhooks.store import EndpointCounts, Store
from pgmb.webhooks.tracker import LeaseTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pgmb._async.broker import AsyncBroker
    from pgmb._async.listener import AsyncSubscription
    from pgmb.webhooks.client import WebhookClient
    from pgmb.webhooks.request import Serialiser
    from pgmb.webhooks.secrets import SealingKey
    from pgmb.webhooks.store import Received

logger = logging.getLogger("pgmb.webhooks")

HEARTBEAT_EVERY: Final = 2.0
ALIVE_FOR: Final = 10.0
"""Seconds after its last heartbeat that a dispatcher counts as alive, as in `pgmb.heartbeat`."""

_RELOAD_EVERY: Final = 1.0
_TAKE_EVERY: Final = 0.1
_CLAIM_EVERY: Final = 0.5
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.25
_LONGEST_PAUSE_WITH_LISTENER: Final = 1.0
"""With a listener too a queue is polled, because retries that fall due send no notification."""
_SMALLEST_BATCH: Final = 16
_LARGEST_BATCH: Final = 500
"""Events per receive. The size halves when the lanes overflow and doubles when a batch is full."""
_LANES_CHECKED_ONE_BY_ONE: Final = 32
"""For a queue that feeds up to this many lanes, the batch size follows the room in each."""
_MOST_DELIVERIES: Final = 10_000
"""Deliveries per process above which queues that feed more lanes are not read."""
_PAUSE_AFTER_ERROR: Final = 5.0
_PAUSE_BEFORE_SMALLER_BATCH: Final = 0.1
"""After an error of the database, which a smaller batch may not meet. It doubles for a batch of one event."""
_PROBE_MARGIN: Final = 5.0


class DispatchLoop:
    """One dispatcher process. Call `turn` and `wait` in a loop, then `stop`."""

    def __init__(
        self,
        client: WebhookClient,
        key: SealingKey | None = None,
        *,
        lease_for: float = 10.0,
        serialiser: Serialiser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id = uuid4()
        self._lease_for = lease_for
        self._clock = clock
        self._directory = EndpointDirectory(key, clock)
        self._sender = Sender(client, clock, serialiser)
        self._leases = LeaseTracker(self._sender, clock, lease_for)
        self._wakeups = StreamWakeups(self._sender.wake)
        self._stopping = False
        self._alive: list[str] = []
        self._joins_at = float("inf")
        self._due: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._batches: dict[str, int] = {}
        self._limits: dict[str, BatchLimit] = {}
        """By queue, and of the deliveries that wait, under the empty name."""
        self._timed: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether any leased event is not settled yet."""
        return len(self._leases) > 0

    async def turn(self, broker: AsyncBroker) -> None:
        """Write results to the database, and lease as many events as the lanes have room for."""
        async with broker.own_connection() as connection:
            store = Store(connection, self._lease_for)
            await self._write_decisions(store)
            await self._leases.report(store)
            if self._is_due("heartbeat", HEARTBEAT_EVERY):
                await self._heartbeat(store, broker.backends())
            if self._is_due("reload", _RELOAD_EVERY):
                await self._reload(store)
                await self._probe(store)
                self._wakeups.follow(broker, {queue.stream for queue in self._directory.queues})
            await self._leases.extend(store)
            await self._take_requests(store)
            await self._claim(store)
            await self._receive(store)

    async def wait(self) -> None:
        """Wait for a result, a notification or the next scheduled step."""
        due = min((at for what, at in self._due.items() if what != "take" or len(self._leases)), default=0.0)
        pause = max(0.0, min(due - self._clock(), _LONGEST_PAUSE_WITH_LISTENER))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._sender.wake.wait(), pause)
        self._sender.wake.clear()

    async def stop(self, broker: AsyncBroker, grace: float = 20.0) -> None:
        """Stop leasing, wait `grace` seconds for requests in flight, and return the other events."""
        self._stopping = True
        await self._wakeups.close()
        for lane in self._directory.lanes.values():
            self._sender.park(lane)
        await self._sender.stop(grace)
        for lane in self._directory.lanes.values():
            self._sender.park(lane)
        async with broker.own_connection() as connection:
            store = Store(connection, self._lease_for)
            await self._write_decisions(store)
            await self._leases.report(store, everything=True)
            await self._heartbeat(store, broker.backends())
            await store.depart(self.id)

    def _is_due(self, what: str, every: float) -> bool:
        now = self._clock()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    async def _write_decisions(self, store: Store) -> None:
        decisions = self._sender.decisions
        while decisions:
            lane, write = decisions[0]
            await write(store)
            lane.undecided -= 1
            del decisions[0]

    async def _heartbeat(self, store: Store, backends: list[int]) -> None:
        counts: list[EndpointCounts] = []
        for endpoint_id, lane in self._directory.lanes.items():
            if lane.delivered or lane.failed:
                counts.append(
                    EndpointCounts(endpoint_id, lane.delivered, lane.failed, lane.error, lane.refused)
                )
                lane.delivered, lane.failed, lane.refused, lane.error = 0, 0, 0, None
        # Its life is counted from before the statement, as nobody else can count it from earlier.
        sent_at, lapsed = self._clock(), self._clock() >= self._sender.alive_until
        self._alive = await store.heartbeat(self.id, socket.gethostname(), os.getpid(), counts, backends)
        if lapsed:
            # The others must see this heartbeat and reduce their shares before this one uses its own.
            alone = self._alive == [str(self.id)]
            self._joins_at = sent_at + (0.0 if alone else 2 * HEARTBEAT_EVERY)
        self._divide()
        self._sender.alive_until = sent_at + ALIVE_FOR
        if lapsed:
            for lane in self._directory.lanes.values():
                self._sender.start(lane)

    def _divide(self) -> None:
        alive = tuple(self._alive) if self._clock() >= self._joins_at else ()
        for endpoint_id, lane in self._directory.lanes.items():
            basis = (alive, lane.endpoint.max_in_flight)
            if lane.share_basis != basis:
                lane.share_basis = basis
                lane.share = share_of(lane.endpoint.max_in_flight, endpoint_id, str(self.id), alive)
                self._sender.start(lane)

    async def _reload(self, store: Store) -> None:
        dropped = await self._directory.reload(store)
        self._divide()
        for lane in (*self._directory.lanes.values(), *dropped):
            if lane.waiting and not lane.open and not lane.probing:
                self._sender.park(lane)
            elif lane.shares_queue:
                self._sender.park(lane, excess=True)

    async def _probe(self, store: Store) -> None:
        waiting = {
            endpoint_id: lane.endpoint.timeout + _PROBE_MARGIN
            for endpoint_id, lane in self._directory.lanes.items()
            if lane.state in PROBED and not lane.probing and lane.share > 0 and not lane.in_flight
        }
        if not waiting or self._stopping:
            return
        for endpoint_id in await store.probe(waiting):
            lane = self._directory.lanes[endpoint_id]
            lane.probing = True
            await (self._probe_own if endpoint_id in self._directory.own else self._probe_shared)(store, lane)
            if not lane.in_flight:
                # No event waits: a later one serves as the probe.
                lane.probing = False
                await store.end_probe(endpoint_id, None, None)

    async def _probe_shared(self, store: Store, lane: Lane) -> None:
        """Test an endpoint with an event that has not failed, or with any if there is none."""
        lanes, at = self._directory.lanes, self._clock()
        self._leases.claim(await store.claim_probe(lane.endpoint_id, fresh=True), lanes, at)
        if not lane.in_flight:
            # A queue is not read while all its endpoints are closed, so its events are not in rows yet.
            await self._receive_for_probe(store, lane.queue, _SMALLEST_BATCH)
        if not lane.in_flight:
            at = self._clock()
            self._leases.claim(await store.claim_probe(lane.endpoint_id, fresh=False), lanes, at)

    async def _probe_own(self, store: Store, lane: Lane) -> None:
        queues = self._directory.own[lane.endpoint_id]
        for hastened in (False, True):
            if hastened and not await store.hasten_retry(lane.endpoint_id):
                return
            for queue in queues:
                await self._receive_for_probe(store, queue, max(_SMALLEST_BATCH, lane.endpoint.batch))
                # The lane has taken the event that says most about the endpoint.
                self._sender.park(lane)
                if lane.in_flight:
                    return

    async def _receive_for_probe(self, store: Store, queue: str, most: int) -> None:
        asked_at = self._clock()
        try:
            received = await self._received(store, queue, most)
        except (psycopg.Error, PgmbError) as error:
            if store.lost:
                raise
            logger.warning("queue %s: %s", queue, error)
            return
        self._leases.receive(received.events, self._directory.lanes, asked_at)

    async def _take_requests(self, store: Store) -> None:
        if not self._directory.limited or not self._is_due("take", _TAKE_EVERY):
            return
        wanted = {
            endpoint_id: wants
            for endpoint_id, lane in self._directory.limited.items()
            if (wants := lane.wanted_requests) > 0
        }
        if not wanted:
            return
        for endpoint_id, given in (await store.take_requests(wanted)).items():
            lane = self._directory.lanes[endpoint_id]
            lane.allow(given)
            self._sender.start(lane)

    async def _claim(self, store: Store) -> None:
        shared = self._directory.shared
        if self._stopping or not shared or not self._is_due("claim", _CLAIM_EVERY):
            return
        # Most of thousands of lanes are empty: only the others are sent.
        rooms = {name: room for name, lane in shared.items() if (room := lane.room) != ROOM}
        limit = self._limits.setdefault("", BatchLimit())
        most = limit.of(_LARGEST_BATCH)
        asked_at = self._clock()
        try:
            claimed = await store.claim(most, ROOM, rooms)
        except psycopg.Error as error:
            if store.lost:
                raise
            limit.failed(most, error)
            logger.warning("deliveries that wait: %s", error)
            return
        limit.succeeded(most, _LARGEST_BATCH)
        if claimed:
            self._due["claim"] = self._clock() + 2 * _SHORTEST_PAUSE
        got = Counter(one.endpoint for one in claimed)
        size = sum(len(one.event.payload) + len(one.event.headers or "") for one in claimed)
        if len(claimed) < most and size < BATCH_BYTES // 91:
            # These are all that were due.
            for endpoint_id, lane in shared.items():
                room = rooms.get(endpoint_id, ROOM)
                if room:
                    lane.has_backlog = got[endpoint_id] >= room
        self._leases.claim(claimed, self._directory.lanes, asked_at)

    async def _receive(self, store: Store) -> None:
        notified = self._wakeups.take_notified()
        for queue, endpoint_id, stream in self._directory.queues:
            most = 0 if self._stopping else self._room_for(queue, endpoint_id)
            step = f"queue {queue}"
            if stream in notified:
                self._due.pop(step, None)
                self._pauses.pop(step, None)
            if most < 1:
                # A finished request sets `wake` when there is room again.
                self._due.pop(step, None)
                continue
            if not self._is_due(step, _SHORTEST_PAUSE):
                continue
            limit = self._limits.setdefault(queue, BatchLimit())
            wanted, most = most, limit.of(most)
            asked_at = self._clock()
            try:
                received = await self._received(store, queue, most)
            except psycopg.Error as error:
                if store.lost:
                    raise
                await self._failed(store, queue, most, limit, error)
                continue
            except PgmbError as error:
                # The queue was dropped, or its condition fails. The other queues go on.
                logger.warning("queue %s: %s", queue, error)
                self._due[step] = self._clock() + _PAUSE_AFTER_ERROR
                continue
            limit.succeeded(most, wanted)
            if received.more:
                pause = 0.0
            elif self._wakeups.is_listening(stream):
                pause = _LONGEST_PAUSE_WITH_LISTENER
            else:
                pause = min(_LONGEST_PAUSE, 2 * self._pauses.get(step, _SHORTEST_PAUSE / 2))
            self._pauses[step] = max(pause, _SHORTEST_PAUSE / 2)
            self._due[step] = self._clock() + pause
            overflowed = self._leases.receive(received.events, self._directory.lanes, asked_at)
            if overflowed:
                self._batches[queue] = max(_SMALLEST_BATCH, most // 2)
            elif received.more and most == wanted and len(received.events) in (0, most):
                self._batches[queue] = min(_LARGEST_BATCH, most * 2)

    async def _failed(
        self, store: Store, queue: str, most: int, limit: BatchLimit, error: psycopg.Error
    ) -> None:
        """Ask a queue that failed for less, later. The other queues go on."""
        logger.warning("queue %s: cannot receive %d events: %s", queue, most, error)
        limit.failed(most, error)
        pause = _PAUSE_BEFORE_SMALLER_BATCH
        if most == 1:
            pause = min(_PAUSE_AFTER_ERROR, max(pause, 2 * self._pauses.get(f"queue {queue}", 0.0)))
        self._pauses[f"queue {queue}"] = pause
        self._due[f"queue {queue}"] = self._clock() + pause
        if limit.failures:
            with contextlib.suppress(PgmbError):
                number = await store.bury_unreadable(queue, str(error).strip(), limit.failures)
                if number is not None:
                    limit.failures = 0
                    logger.error("queue %s: event %d cannot be read: now a dead letter", queue, number)

    async def _received(self, store: Store, queue: str, most: int) -> Received:
        try:
            return await store.receive(queue, most, queue in self._timed)
        except TimeoutRequired:
            # The queue has an SQL condition. Without one, receiving takes one round trip less.
            self._timed.add(queue)
            return await store.receive(queue, most, True)

    def _room_for(self, queue: str, endpoint_id: str | None) -> int:
        """How many events to receive from a queue: 0 while the lanes that it feeds have enough."""
        if endpoint_id is not None:
            lane = self._directory.lanes[endpoint_id]
            # Only when at least half is free: one large batch is cheaper than many small ones.
            return min(lane.room, _LARGEST_BATCH) if lane.room >= lane.waiting else 0
        lanes = self._directory.sharing.get(queue, [])
        batch = self._batches.get(queue, ROOM)
        if self._clock() < self._joins_at or not self._alive:
            return 0
        if len(lanes) > _LANES_CHECKED_ONE_BY_ONE:
            return batch if self._leases.deliveries < _MOST_DELIVERIES else 0
        room = max((lane.room for lane in lanes if lane.room >= lane.waiting), default=0)
        if room == 0 and any(lane.state == "disabled" for lane in lanes):
            # Events for disabled endpoints are still received, unless they would wait for an open lane.
            return 0 if any(lane.open for lane in lanes) else batch
        return min(room, batch)


class StreamWakeups:
    """Listens for notifications of streams, and sets `wake`, so that an idle dispatcher polls rarely."""

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._subscriptions: dict[str, AsyncSubscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._notified: set[str] = set()
        self._closing = False

    def follow(self, broker: AsyncBroker, streams: Iterable[str]) -> None:
        """Listen to these streams too."""
        if self._closing:
            return
        for stream in set(streams) - self._subscriptions.keys():
            subscription = self._subscriptions[stream] = broker.listener().subscribe(stream)
            self._tasks[stream] = asyncio.create_task(self._listen(stream, subscription))

    def is_listening(self, stream: str) -> bool:
        """Whether the listener of a stream is connected."""
        subscription = self._subscriptions.get(stream)
        return subscription is not None and subscription.healthy

    def take_notified(self) -> set[str]:
        """The streams notified since the last call."""
        notified, self._notified = self._notified, set()
        return notified

    async def close(self) -> None:
        """Stop listening."""
        self._closing = True
        for subscription in self._subscriptions.values():
            subscription.close()
        await asyncio.gather(*self._tasks.values())

    async def _listen(self, stream: str, subscription: AsyncSubscription) -> None:
        while await subscription.wait() and not self._closing:
            self._notified.add(stream)
            self._wake.set()


def share_of(limit: int, endpoint: str, dispatcher: str, alive: Sequence[str]) -> int:
    """A dispatcher's share of `limit` concurrent requests. The shares of all live dispatchers add up to it.

    The remainder goes to the dispatchers with the lowest hash for this endpoint, so it differs by endpoint.
    """
    if dispatcher not in alive:
        return 0
    each, rest = divmod(limit, len(alive))
    if rest == 0:
        return each
    ranked = sorted(alive, key=lambda one: hashlib.blake2b(f"{endpoint} {one}".encode()).digest())
    return each + (ranked.index(dispatcher) < rest)
