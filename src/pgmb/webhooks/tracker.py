"""The leases that a dispatcher holds: filled into lanes, extended, and settled when their deliveries end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pgmb.types import is_erased
from pgmb.webhooks.leases import DeliveryFailure, Lease, WebhookDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgmb.webhooks.lanes import Lane
    from pgmb.webhooks.leases import Settlement
    from pgmb.webhooks.sender import Sender
    from pgmb.webhooks.store import ClaimedEvent, ReceivedEvent, Store

logger = logging.getLogger("pgmb.webhooks")

_SETTLE_EVERY: Final = 0.25


class LeaseTracker:
    """Keeps each lease until all its deliveries are settled, and extends leases that take long."""

    def __init__(self, sender: Sender, clock: Callable[[], float], lease_for: float) -> None:
        self._sender = sender
        self._clock = clock
        self._lease_for = lease_for
        self._leases: dict[str, Lease] = {}
        self._reports: list[Settlement] = []
        self._extend_at = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def deliveries(self) -> int:
        """Deliveries in flight or pending in lanes."""
        return sum(lease.open for lease in self._leases.values())

    def receive(self, received: Sequence[ReceivedEvent], lanes: dict[str, Lane], asked_at: float) -> bool:
        """Put received events into the lanes. Events for a full lane go back to the database.

        `asked_at`: when the statement was sent, from which on the lease counts.
        Returns whether a lane that was not full before became so.
        """
        rooms: dict[str, int] = {}
        overflowed = False
        for one in received:
            lease = self._lease(one.lease, asked_at, claimed=False)
            if is_erased(one.event.headers):
                # Nothing is left to send: it is settled with the lease.
                self._sender.wake.set()
                continue
            lease.add(one.seq, len(one.endpoints))
            for endpoint_id in one.endpoints:
                lane = lanes.get(endpoint_id)
                room = rooms.get(endpoint_id)
                if room is None:
                    room = 0 if lane is None else lane.room_for_received
                if lane is not None and room > 0:
                    rooms[endpoint_id] = room - 1
                    lane.put(WebhookDelivery(lease, one.seq, one.seq, one.attempt, one.event))
                    continue
                if lane is not None:
                    overflowed |= lane.open and not lane.has_backlog
                    lane.has_backlog = True
                lease.failed(DeliveryFailure(one.seq, endpoint_id, 0.0, None, False, False))
                self._sender.wake.set()
        for endpoint_id in rooms:
            self._sender.start(lanes[endpoint_id])
        return overflowed

    def claim(self, claimed: Sequence[ClaimedEvent], lanes: dict[str, Lane], asked_at: float) -> None:
        """Put claimed events, which are for one endpoint each, into the lanes."""
        touched: dict[str, Lane] = {}
        for one in claimed:
            lease = self._lease(one.lease, asked_at, claimed=True)
            lease.add(one.row, 1)
            if is_erased(one.event.headers):
                lease.delivered(one.row)
                self._sender.wake.set()
                continue
            lane = lanes.get(one.endpoint)
            if lane is None:
                # The endpoint is newer than the directory.
                lease.failed(DeliveryFailure(one.row, one.endpoint, 0.0, None, False, False))
                continue
            lane.put(WebhookDelivery(lease, one.row, one.seq, one.attempt, one.event))
            touched[one.endpoint] = lane
        for lane in touched.values():
            self._sender.start(lane)

    async def report(self, store: Store, *, everything: bool = False) -> None:
        """Settle finished leases, and the results so far of the others. `everything` ignores the interval."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.open == 0:
                del self._leases[lease.id]
            elif not everything and now < lease.reported_at + _SETTLE_EVERY:
                continue
            report = lease.report(now)
            if report is not None:
                self._reports.append(report)
        tried = self._sender.attempts
        reports, attempts = len(self._reports), len(tried)
        if not reports and not attempts:
            return
        # Removed only after the commit: an unreachable database loses no result.
        lost = await store.settle(self._reports[:reports], tried[:attempts])
        del self._reports[:reports], tried[:attempts]
        if lost:
            logger.warning(
                "%d leases expired before they were settled: their events are delivered again", lost
            )

    async def extend(self, store: Store) -> None:
        """Extend the leases that are older than a quarter of the lease time."""
        now = self._clock()
        if now < self._extend_at:
            return
        self._extend_at = now + self._lease_for / 4
        old = [lease for lease in self._leases.values() if lease.taken_at < now - self._lease_for / 4]
        if not old:
            return
        extended = await store.extend(
            [lease.id for lease in old if not lease.claimed], [lease.id for lease in old if lease.claimed]
        )
        for lease in old:
            if lease.id in extended:
                lease.valid_until = now + self._lease_for

    def _lease(self, lease_id: str, asked_at: float, *, claimed: bool) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            until = asked_at + self._lease_for
            lease = self._leases[lease_id] = Lease(lease_id, self._clock(), until, claimed=claimed)
        return lease
