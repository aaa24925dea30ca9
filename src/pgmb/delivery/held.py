"""The leases that a dispatcher holds: what enters the lanes under them, and what is reported of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pgmb.delivery.work import Delivery, Failure, Lease, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgmb.delivery.lane import Lane
    from pgmb.delivery.posting import Posting
    from pgmb.delivery.store import Claimed, Received, Store

logger = logging.getLogger("pgmb.delivery")

_REPORT_EVERY: Final = 0.25


class Held:
    """Leases by their id, until all that they hold is settled."""

    def __init__(self, posting: Posting, clock: Callable[[], float], lease_for: float) -> None:
        self._posting = posting
        self._clock = clock
        self._lease_for = lease_for
        self._leases: dict[str, Lease] = {}
        self._reports: list[Report] = []
        self._extend_at = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def deliveries(self) -> int:
        """How many are under way or wait in lanes."""
        return sum(lease.open for lease in self._leases.values())

    def receive(self, received: Sequence[Received], lanes: dict[str, Lane]) -> bool:
        """Events of a queue. What a lane that shares its queue has no room for waits in the database.

        Returns whether that was so for a lane that had some before.
        """
        rooms: dict[str, int] = {}
        overflowed = False
        for one in received:
            lease = self._lease(one.lease, waited=False)
            lease.add(one.seq, len(one.endpoints))
            for identity in one.endpoints:
                lane = lanes.get(identity)
                room = rooms.get(identity)
                if room is None:
                    room = 0 if lane is None else lane.room_for_fresh
                if lane is not None and room > 0:
                    rooms[identity] = room - 1
                    lane.put(Delivery(lane, lease, one.seq, one.seq, one.attempt, one.event))
                    continue
                if lane is not None:
                    overflowed |= lane.open and not lane.behind
                    lane.behind = True
                lease.failed(Failure(one.seq, identity, 0.0, None, False, False))
                self._posting.news.set()
        for identity in rooms:
            self._posting.start(lanes[identity])
        return overflowed

    def claim(self, claimed: Sequence[Claimed], lanes: dict[str, Lane]) -> None:
        """Events that waited for one endpoint each."""
        touched: dict[str, Lane] = {}
        for one in claimed:
            lease = self._lease(one.lease, waited=True)
            lease.add(one.row, 1)
            lane = lanes.get(one.endpoint)
            if lane is None:
                # Of an endpoint that is not known here yet.
                lease.failed(Failure(one.row, one.endpoint, 0.0, None, False, False))
                continue
            lane.put(Delivery(lane, lease, one.row, one.seq, one.attempt, one.event))
            touched[one.endpoint] = lane
        for lane in touched.values():
            self._posting.start(lane)

    async def report(self, store: Store, *, everything: bool = False) -> None:
        """Settle leases that are done with, and what is known of those that take longer."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.open == 0:
                del self._leases[lease.id]
            elif not everything and now < lease.reported_at + _REPORT_EVERY:
                continue
            report = lease.report(now)
            if report is not None:
                self._reports.append(report)
        tried = self._posting.tried
        reports, attempts = len(self._reports), len(tried)
        if not reports and not attempts:
            return
        # Kept until the database has them, however long it is away.
        lost = await store.settle(self._reports[:reports], tried[:attempts])
        del self._reports[:reports], tried[:attempts]
        if lost:
            logger.warning("%d leases were lost before they were settled: their events come again", lost)

    async def extend(self, store: Store) -> None:
        """Keep what takes longer."""
        now = self._clock()
        if now < self._extend_at:
            return
        self._extend_at = now + self._lease_for / 4
        old = [lease for lease in self._leases.values() if lease.taken_at < now - self._lease_for / 4]
        if old:
            await store.extend(
                [lease.id for lease in old if not lease.waited], [lease.id for lease in old if lease.waited]
            )

    def _lease(self, identity: str, *, waited: bool) -> Lease:
        lease = self._leases.get(identity)
        if lease is None:
            lease = self._leases[identity] = Lease(identity, self._clock(), waited=waited)
        return lease
