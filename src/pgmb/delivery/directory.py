"""The endpoints that a dispatcher knows, a lane for each, and the queues that feed them."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pgmb.delivery.breaker import Breaker
from pgmb.delivery.endpoint import Endpoint
from pgmb.delivery.lane import Lane, OrderedLane
from pgmb.delivery.sealing import open_headers
from pgmb.delivery.signature import parse_secret
from pgmb.errors import PgmbError, SecretKeyMissing

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgmb.delivery.sealing import Key
    from pgmb.delivery.signature import Secret
    from pgmb.delivery.store import Feeding, Store

logger = logging.getLogger("pgmb.delivery")

_OVERLAP: Final = timedelta(seconds=10)
"""What changed so long before the last change seen is asked for again: it may have been committed late."""
_ALL_AGAIN_EVERY: Final = 30.0


class Directory:
    """Kept up to date by `reload`, which asks for what changed, and now and then for everything."""

    def __init__(self, key: Key | None, clock: Callable[[], float]) -> None:
        self.lanes: dict[str, Lane] = {}
        self.queues: list[Feeding] = []
        self.own: dict[str, str] = {}
        """The queue of each endpoint that has one for itself."""
        self.shared: dict[str, Lane] = {}
        self.sharing: dict[str, list[Lane]] = {}
        """The lanes of those that share a queue, by its name."""
        self.limited: dict[str, Lane] = {}
        self._key = key
        self._clock = clock
        self._changed_at: datetime | None = None
        self._all_again_at = float("-inf")
        self._seen: dict[str, datetime] = {}

    async def reload(self, store: Store) -> list[Lane]:
        """Returns the lanes of endpoints that were dropped."""
        everything = self._clock() >= self._all_again_at
        if everything:
            self._all_again_at = self._clock() + _ALL_AGAIN_EVERY
        since = None if everything or self._changed_at is None else self._changed_at - _OVERLAP
        rows = await store.endpoints(since)
        for row in rows:
            self._take(row)
        dropped: list[Lane] = []
        if everything:
            for gone in self.lanes.keys() - {str(row[0]) for row in rows}:
                self.lanes[gone].state = "dropped"
                dropped.append(self.lanes.pop(gone))
                del self._seen[gone]
        if rows:
            self._changed_at = max(row[-1] for row in rows)
        self.queues = [
            one for one in await store.queues() if one.endpoint is None or one.endpoint in self.lanes
        ]
        self.own = {one.endpoint: one.queue for one in self.queues if one.endpoint is not None}
        self.shared = {name: lane for name, lane in self.lanes.items() if name not in self.own}
        self.sharing = {}
        for name, lane in self.lanes.items():
            lane.shares_queue = name not in self.own
            if lane.shares_queue:
                self.sharing.setdefault(lane.queue, []).append(lane)
        self.limited = {name: lane for name, lane in self.lanes.items() if lane.endpoint.rps is not None}
        return dropped

    def _take(self, row: tuple[Any, ...]) -> None:
        identity = str(row[0])
        lane = self.lanes.get(identity)
        if lane is not None and self._seen[identity] == row[-1] and lane.state == row[13]:
            return
        state, ordered, sealed = row[13], row[15], row[17]
        secrets: tuple[Secret, ...] = ()
        headers: dict[str, str] = {}
        try:
            secrets = self._open(row[0], sealed)
            headers = open_headers(self._key, row[0], row[6])
        except PgmbError as error:
            # Nothing is posted that its receiver could not verify.
            logger.error("endpoint %s: %s", row[1], error)
            state = "sealed"
        endpoint = _endpoint(row, secrets, headers)
        if lane is None:
            lane = self.lanes[identity] = (OrderedLane if ordered else Lane)(endpoint, self._clock)
            lane.share = 0
            lane.behind = True
        self._seen[identity] = row[-1]
        lane.endpoint = endpoint
        lane.queue = row[18]
        lane.logs_all = row[11] == "all"
        if lane.probing:
            return
        if state == "active" and lane.state != "active":
            lane.breaker = Breaker(self._clock)
            lane.behind = True
        lane.state = state

    def _open(self, endpoint: UUID, sealed: list[bytes]) -> tuple[Secret, ...]:
        if not sealed:
            return ()
        if self._key is None:
            raise SecretKeyMissing("it has secrets, and there is no key to open them")
        return tuple(parse_secret(self._key.open(bytes(one), endpoint)) for one in sealed)


def _endpoint(row: tuple[Any, ...], secrets: tuple[Secret, ...], headers: dict[str, str]) -> Endpoint:
    retry_after = row[10]
    return Endpoint(
        id=row[0],
        name=row[1],
        url=row[2],
        body=row[3],
        batch=row[4],
        timeout=row[5].total_seconds(),
        headers=headers,
        secrets=secrets,
        gzip_above=row[7],
        rps=row[8],
        max_in_flight=row[9],
        retry_after=None if retry_after is None else tuple(wait.total_seconds() for wait in retry_after),
        keep_response=row[12],
        source=row[16],
    )
