"""One lane per endpoint: its pending deliveries, its limits and its circuit breaker.

The directory reads the endpoints from the database and keeps a lane for each.
"""

from __future__ import annotations

import logging
from collections import deque
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from pgmb.errors import PgmbError, SecretKeyMissing
from pgmb.webhooks.outcomes import CircuitBreaker
from pgmb.webhooks.request import Endpoint
from pgmb.webhooks.secrets import open_headers, parse_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from pgmb.webhooks.leases import WebhookDelivery
    from pgmb.webhooks.secrets import SealingKey, Secret
    from pgmb.webhooks.store import EndpointRow, SourceQueue, Store

PROBED: Final = frozenset({"throttled", "tripped"})
"""States that end with a request that succeeds."""
ROOM: Final = 64
"""Deliveries that a lane takes before its delivery rate is known."""
_LARGEST_LEASE: Final = 1000
_ROOM_SECONDS: Final = 0.5
"""A lane takes the deliveries that it is likely to finish within this time."""
_RATE_SECONDS: Final = 0.25
_LATENCY_WEIGHT: Final = 0.2
"""Of the newest request, in the moving average."""
_ALLOWED_SECONDS: Final = 1.0
"""Requests granted by the rate limit expire after this time."""


class Lane:
    """Pending deliveries to one endpoint, first in, first out."""

    ordered = False

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.endpoint_id = str(endpoint.id)
        self.queue = ""
        self.shares_queue = True
        """Whether the queue feeds other endpoints too, which this lane must not hold up."""
        self.state = "active"
        self.share = 0
        """Requests that this process may have in flight."""
        self.share_basis: object = None
        """The inputs that the share was computed from."""
        self.in_flight = 0
        self.has_backlog = False
        """Whether deliveries wait in the database. New events then wait there too, behind them."""
        self.probing = False
        """Whether this process may send one request, to test an endpoint that is throttled or tripped."""
        self.undecided = 0
        """Changes of the state that are not written to the database yet."""
        self.is_worker = False
        """Whether its queues are made for it. No answer disables a worker."""
        self.logs_all = False
        """Whether successful attempts are logged too."""
        self.delivered = 0
        self.failed = 0
        self.refused = 0
        """The failures that were about the message."""
        self.error: str | None = None
        self.failing = False
        """Whether the newest request failed. Only the first failure after a success is a line in the log."""
        self.breaker = CircuitBreaker(clock)
        self.waiting = 0
        self._clock = clock
        self._waiting: deque[WebhookDelivery] = deque()
        self._allowed = 0
        self._allowed_at = 0.0
        self._started: dict[int, float] = {}
        """When each request in flight was started, the oldest first."""
        self._latency = 0.0
        """Seconds from the start to the end of a request, a moving average."""
        self._rate = 0.0
        self._counted = 0
        self._counted_at = clock()

    @property
    def open(self) -> bool:
        """Whether requests may be sent now."""
        return self.state == "active"

    @property
    def room(self) -> int:
        """How many more deliveries fit."""
        if not self.open or self.share < 1:
            return 0
        return max(0, self._bound - self.waiting)

    @property
    def _bound(self) -> int:
        """How many deliveries may be pending: those that it will send soon, one for a slow endpoint."""
        if self.endpoint.rps is not None:
            bound = max(1.0, self.endpoint.rps * _ROOM_SECONDS)
        else:
            bound = max(float(ROOM), self._rate * _ROOM_SECONDS)
        return int(min(bound, self._capacity)) * self.endpoint.batch

    @property
    def _capacity(self) -> float:
        """Requests that can start soon, by how long requests take, or by the age of the oldest in flight."""
        oldest = self._clock() - next(iter(self._started.values())) if self._started else 0.0
        latency = max(self._latency, oldest)
        if latency == 0:
            return float("inf")
        return max(1.0, self.share - self.in_flight, self.share * _ROOM_SECONDS / latency)

    @property
    def room_for_received(self) -> int:
        """How many newly received events fit. An endpoint with its own queue takes all: it asked for them."""
        if not self.shares_queue:
            return ROOM * self.endpoint.batch + _LARGEST_LEASE
        if self.probing:
            return max(0, 1 - self.in_flight - self.waiting)
        return 0 if self.has_backlog else self.room

    @property
    def wanted_requests(self) -> int:
        """Requests to ask the rate limit for."""
        if self.endpoint.rps is None or not self.open:
            return 0
        requests = -(-self.waiting // self.endpoint.batch)
        return max(0, min(requests, self.share - self.in_flight) - self.allowed)

    @property
    def allowed(self) -> int:
        if self._allowed and self._clock() > self._allowed_at + _ALLOWED_SECONDS:
            self._allowed = 0
        return self._allowed

    def allow(self, requests: int) -> None:
        """Add requests that the rate limit granted."""
        self._allowed = self.allowed + requests
        self._allowed_at = self._clock()

    def put(self, delivery: WebhookDelivery) -> None:
        self.waiting += 1
        self._waiting.append(delivery)

    @property
    def startable(self) -> int:
        """How many requests can start now."""
        free = min(self.share - self.in_flight, self.waiting)
        if self.probing:
            return max(0, min(free, 1 - self.in_flight))
        if not self.open:
            return 0
        if self.endpoint.rps is not None:
            free = min(free, self.allowed)
        return max(0, free)

    def take(self) -> list[WebhookDelivery] | None:
        """The deliveries of the next request; None if no request can start now."""
        if self.startable < 1:
            return None
        taken = self._pick()
        if not taken:
            return None
        if self.endpoint.rps is not None and not self.probing:
            self._allowed -= 1
        self.in_flight += 1
        self.waiting -= len(taken)
        self._started[id(taken)] = self._clock()
        return taken

    def abandon(self, taken: list[WebhookDelivery]) -> list[WebhookDelivery]:
        """End a cancelled request. Returns the deliveries that were pending behind it."""
        self.in_flight -= 1
        del self._started[id(taken)]
        return []

    def finish(
        self, taken: list[WebhookDelivery], *, delivered: bool, refused: bool = False
    ) -> list[WebhookDelivery]:
        """End a request. Returns the deliveries that a failure takes along: those behind it in its key."""
        self.in_flight -= 1
        self._counted += len(taken)
        now = self._clock()
        self._latency += _LATENCY_WEIGHT * (now - self._started.pop(id(taken)) - self._latency)
        if now - self._counted_at >= _RATE_SECONDS:
            self._rate = self._counted / (now - self._counted_at)
            self._counted, self._counted_at = 0, now
        if delivered:
            self.delivered += len(taken)
        else:
            self.failed += len(taken)
            self.refused += len(taken) if refused else 0
        return []

    def clear(self) -> Iterator[WebhookDelivery]:
        """Remove and return all pending deliveries."""
        while self._waiting:
            self.waiting -= 1
            yield self._waiting.popleft()

    def excess(self) -> Iterator[WebhookDelivery]:
        """Remove and return the newest pending deliveries that the lane will not send soon."""
        while self._waiting and self.waiting > self._bound:
            self.waiting -= 1
            yield self._waiting.pop()

    def _pick(self) -> list[WebhookDelivery]:
        if self.probing:
            # An event that failed before says less about the endpoint than one that did not.
            fewest = min(range(len(self._waiting)), key=lambda place: self._waiting[place].attempt)
            self._waiting.rotate(-fewest)
        return self._request_of(self._waiting)

    def _request_of(self, waiting: deque[WebhookDelivery]) -> list[WebhookDelivery]:
        """Take one request's deliveries from the front."""
        taken = [waiting.popleft()]
        # One lease and one attempt per batch, so that a retried batch has the same events and the same id.
        while (
            waiting
            and len(taken) < self.endpoint.batch
            and waiting[0].lease is taken[0].lease
            and waiting[0].attempt == taken[0].attempt
        ):
            taken.append(waiting.popleft())
        return taken


class OrderedLane(Lane):
    """Pending deliveries to one endpoint, one request at a time per key."""

    ordered = True

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        super().__init__(endpoint, clock)
        self._keys: dict[str, deque[WebhookDelivery]] = {}
        self._ready: deque[str | None] = deque()
        self._keyless: deque[WebhookDelivery] = deque()

    @property
    def _capacity(self) -> float:
        # Deliveries wait for their keys too, and only this lane waits for the queue.
        return float("inf")

    @property
    def startable(self) -> int:
        return min(super().startable, len(self._ready))

    def put(self, delivery: WebhookDelivery) -> None:
        self.waiting += 1
        key = delivery.event.key
        if key is None:
            self._keyless.append(delivery)
            self._ready.append(None)
            return
        queue = self._keys.get(key)
        if queue is None:
            queue = self._keys[key] = deque()
            self._ready.append(key)
        queue.append(delivery)

    def abandon(self, taken: list[WebhookDelivery]) -> list[WebhookDelivery]:
        super().abandon(taken)
        return self._end(taken[0].event.key)

    def finish(
        self, taken: list[WebhookDelivery], *, delivered: bool, refused: bool = False
    ) -> list[WebhookDelivery]:
        super().finish(taken, delivered=delivered, refused=refused)
        key = taken[0].event.key
        if delivered and key is not None and self._keys[key]:
            self._ready.append(key)
            return []
        return self._end(key)

    def _end(self, key: str | None) -> list[WebhookDelivery]:
        """Remove a key. Returns its pending deliveries."""
        if key is None:
            return []
        behind = self._keys.pop(key)
        self.waiting -= len(behind)
        return list(behind)

    def clear(self) -> Iterator[WebhookDelivery]:
        while self._keyless:
            self.waiting -= 1
            yield self._keyless.popleft()
        # Keys with a request in flight are removed when it ends.
        for key in [key for key in self._ready if key is not None]:
            queue = self._keys.pop(key)
            self.waiting -= len(queue)
            yield from queue
        self._ready.clear()

    def _pick(self) -> list[WebhookDelivery]:
        if self.probing:
            keyless = self._keyless[0].attempt if self._keyless else 0
            attempts = [keyless if key is None else self._keys[key][0].attempt for key in self._ready]
            self._ready.rotate(-attempts.index(min(attempts)))
        key = self._ready.popleft()
        if key is None:
            return [self._keyless.popleft()]
        return self._request_of(self._keys[key])


logger = logging.getLogger("pgmb.webhooks")

_OVERLAP: Final = timedelta(seconds=10)
"""Reloads go back this far before the last one, because changes may commit late."""
_FULL_RELOAD_EVERY: Final = 30.0


class EndpointDirectory:
    """The endpoints and their lanes. `reload` reads changes, and everything every 30 seconds."""

    def __init__(self, key: SealingKey | None, clock: Callable[[], float]) -> None:
        self.lanes: dict[str, Lane] = {}
        self.queues: list[SourceQueue] = []
        self.own: dict[str, list[str]] = {}
        """Queues by endpoint, for endpoints with queues of their own."""
        self.shared: dict[str, Lane] = {}
        self.sharing: dict[str, list[Lane]] = {}
        """Lanes by the queue that they share."""
        self.limited: dict[str, Lane] = {}
        self._key = key
        self._clock = clock
        self._known_at: datetime | None = None
        """The database's clock before the endpoints were last read."""
        self._read_at: datetime | None = None
        self._all_again_at = float("-inf")
        self._seen: dict[str, datetime] = {}

    async def reload(self, store: Store) -> list[Lane]:
        """Read changed endpoints and all queues. Returns the lanes of dropped endpoints."""
        everything = self._clock() >= self._all_again_at
        if everything:
            self._all_again_at = self._clock() + _FULL_RELOAD_EVERY
        since = None if everything or self._known_at is None else self._known_at - _OVERLAP
        rows = await store.endpoints(since)
        for row in rows:
            self._update(row)
        dropped: list[Lane] = []
        if everything:
            for gone in self.lanes.keys() - {str(row.id) for row in rows}:
                self.lanes[gone].state = "dropped"
                dropped.append(self.lanes.pop(gone))
                del self._seen[gone]
        queues, now = await store.queues()
        if now is not None and self._read_at is not None and now < self._read_at:
            # The clock was set back: what changes from now on has earlier times than what is known.
            self._all_again_at = float("-inf")
        self._known_at, self._read_at = self._read_at, now
        self.queues = [one for one in queues if one.endpoint is None or one.endpoint in self.lanes]
        self.own = {}
        for one in self.queues:
            if one.endpoint is not None:
                self.own.setdefault(one.endpoint, []).append(one.queue)
        self.shared = {name: lane for name, lane in self.lanes.items() if name not in self.own}
        self.sharing = {}
        for name, lane in self.lanes.items():
            lane.shares_queue = name not in self.own
            if lane.shares_queue:
                self.sharing.setdefault(lane.queue, []).append(lane)
        self.limited = {name: lane for name, lane in self.lanes.items() if lane.endpoint.rps is not None}
        return dropped

    def _update(self, row: EndpointRow) -> None:
        endpoint_id = str(row.id)
        lane = self.lanes.get(endpoint_id)
        if lane is not None and self._seen[endpoint_id] == row.changed_at and lane.state == row.state:
            return
        state = row.state
        try:
            secrets = self._open(row.id, row.secrets)
            headers = open_headers(self._key, row.id, row.headers)
            endpoint = _endpoint(row, secrets, headers)
        except PgmbError as error:
            # No unsigned request is sent to a receiver that expects a signature, nor one with other headers.
            logger.error("endpoint %s: %s", row.name, error)
            state = "sealed"
            endpoint = _endpoint(row, (), {})
        known = lane is not None
        if lane is None:
            lane = self.lanes[endpoint_id] = (OrderedLane if row.ordered else Lane)(endpoint, self._clock)
            lane.share = 0
            lane.has_backlog = True
        self._seen[endpoint_id] = row.changed_at
        lane.endpoint = endpoint
        lane.queue = row.queue
        lane.logs_all = row.log == "all"
        lane.is_worker = row.worker
        if lane.undecided or (lane.probing and state in PROBED):
            # The row does not have the newest state, or this process is about to change it.
            return
        if known and state == "disabled" and lane.state != "disabled":
            # It failed for days, or an operator or another process disabled it.
            logger.warning("endpoint %s: disabled", row.name)
        if state == "active" and lane.state != "active":
            lane.breaker = CircuitBreaker(self._clock)
            lane.has_backlog = True
        lane.state = state

    def _open(self, endpoint: UUID, sealed: list[bytes]) -> tuple[Secret, ...]:
        if not sealed:
            return ()
        if self._key is None:
            raise SecretKeyMissing("it has secrets, but PGMB_SECRET_KEY is not set")
        return tuple(parse_secret(self._key.open(bytes(one), endpoint)) for one in sealed)


def _endpoint(row: EndpointRow, secrets: tuple[Secret, ...], headers: dict[str, str]) -> Endpoint:
    return Endpoint(
        id=row.id,
        name=row.name,
        url=row.url,
        body=row.body,
        batch=row.batch,
        timeout=row.timeout.total_seconds(),
        headers=headers,
        secrets=secrets,
        gzip_above=row.gzip_above,
        rps=row.rps,
        max_in_flight=row.max_in_flight,
        retry_after=None
        if row.retry_after is None
        else tuple(wait.total_seconds() for wait in row.retry_after),
        keep_response=row.keep_response,
        source=row.source,
    )
