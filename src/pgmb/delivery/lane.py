"""An endpoint's lane: what waits for it in this process, and how much of it may be on its way. No I/O."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from pgmb.delivery.breaker import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgmb.delivery.endpoint import Endpoint
    from pgmb.delivery.work import Delivery

ROOM: Final = 64
"""How much a lane takes before it is known how fast it delivers."""
_LARGEST_LEASE: Final = 1000
_PATIENCE: Final = 0.5
"""A lane takes as much as it is likely to deliver within so many seconds."""
_COUNTED_FOR: Final = 0.25
_KEPT_FOR: Final = 1.0
"""Requests that the limit allowed are good for so many seconds."""


class Lane:
    """Deliveries to one endpoint, in the order they came."""

    ordered = False

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        self.endpoint = endpoint
        self.identity = str(endpoint.id)
        self.queue = ""
        self.shares_queue = True
        """Whether other endpoints are fed by the same queue: then it must not hold them up."""
        self.state = "active"
        self.share = 0
        """How many requests this process may have under way."""
        self.cut: object = None
        """What the share was computed from."""
        self.busy = 0
        self.behind = False
        """Whether some wait in the database: then the next ones wait behind them."""
        self.probing = False
        self.logs_all = False
        """Whether attempts that went well are written down too."""
        self.held_until = float("-inf")
        """Until when the endpoint asked to be left alone."""
        self.delivered = 0
        self.failed = 0
        self.error: str | None = None
        self.breaker = Breaker(clock)
        self.waiting = 0
        self._clock = clock
        self._waiting: deque[Delivery] = deque()
        self._allowed = 0
        self._allowed_at = 0.0
        self._rate = 0.0
        self._counted = 0
        self._counted_at = clock()

    @property
    def open(self) -> bool:
        """Whether it may be posted to now."""
        return self.state == "active" and self._clock() >= self.held_until

    @property
    def room(self) -> int:
        """How many more deliveries it takes."""
        if not self.open or self.share < 1:
            return 0
        if self.endpoint.rps is not None:
            bound = max(1.0, self.endpoint.rps * _PATIENCE)
        else:
            bound = max(float(ROOM), self._rate * _PATIENCE)
        return max(0, int(bound) * self.endpoint.batch - self.waiting)

    @property
    def room_for_fresh(self) -> int:
        """How many more events it takes that did not wait; with a queue of its own, what it asked for."""
        if not self.shares_queue or self.probing:
            return ROOM * self.endpoint.batch + _LARGEST_LEASE
        return 0 if self.behind else self.room

    @property
    def wants(self) -> int:
        """How many requests it would make if its limit allowed them."""
        if self.endpoint.rps is None or not self.open:
            return 0
        requests = -(-self.waiting // self.endpoint.batch)
        return max(0, min(requests, self.share - self.busy) - self.allowed)

    @property
    def allowed(self) -> int:
        if self._allowed and self._clock() > self._allowed_at + _KEPT_FOR:
            self._allowed = 0
        return self._allowed

    def allow(self, requests: int) -> None:
        """So many more requests are within its limit."""
        self._allowed = self.allowed + requests
        self._allowed_at = self._clock()

    def put(self, delivery: Delivery) -> None:
        self.waiting += 1
        self._waiting.append(delivery)

    @property
    def startable(self) -> int:
        """How many requests could begin now."""
        if not self.probing and not self.open:
            return 0
        free = min(self.share - self.busy, self.waiting)
        if self.endpoint.rps is not None and not self.probing:
            free = min(free, self.allowed)
        return max(0, free)

    def take(self) -> list[Delivery] | None:
        """What the next request shall hold; None if there is none to be made now."""
        if self.startable < 1:
            return None
        taken = self._pick()
        if not taken:
            return None
        if self.endpoint.rps is not None and not self.probing:
            self._allowed -= 1
        self.busy += 1
        self.waiting -= len(taken)
        return taken

    def abandoned(self, taken: list[Delivery]) -> list[Delivery]:
        """A request was given up before anything came back. Returns what goes back with it."""
        self.busy -= 1
        return []

    def finished(self, taken: list[Delivery], *, delivered: bool) -> list[Delivery]:
        """A request came back. Returns what is left behind with what failed."""
        self.busy -= 1
        self._counted += len(taken)
        now = self._clock()
        if now - self._counted_at >= _COUNTED_FOR:
            self._rate = self._counted / (now - self._counted_at)
            self._counted, self._counted_at = 0, now
        if delivered:
            self.delivered += len(taken)
        else:
            self.failed += len(taken)
        return []

    def clear(self) -> Iterator[Delivery]:
        """Gives up what waits."""
        while self._waiting:
            self.waiting -= 1
            yield self._waiting.popleft()

    def _pick(self) -> list[Delivery]:
        return self._request_of(self._waiting)

    def _request_of(self, waiting: deque[Delivery]) -> list[Delivery]:
        """What the next request takes of those that wait."""
        taken = [waiting.popleft()]
        # One lease, one attempt: so a batch that failed comes again as it was.
        while (
            waiting
            and len(taken) < self.endpoint.batch
            and waiting[0].lease is taken[0].lease
            and waiting[0].attempt == taken[0].attempt
        ):
            taken.append(waiting.popleft())
        return taken


class OrderedLane(Lane):
    """Deliveries to one endpoint: those of a key one after the other."""

    ordered = True

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        super().__init__(endpoint, clock)
        self._keys: dict[str, deque[Delivery]] = {}
        self._ready: deque[str | None] = deque()
        self._keyless: deque[Delivery] = deque()

    @property
    def startable(self) -> int:
        return min(super().startable, len(self._ready))

    def put(self, delivery: Delivery) -> None:
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

    def abandoned(self, taken: list[Delivery]) -> list[Delivery]:
        super().abandoned(taken)
        return self._end(taken[0].event.key)

    def finished(self, taken: list[Delivery], *, delivered: bool) -> list[Delivery]:
        super().finished(taken, delivered=delivered)
        key = taken[0].event.key
        if delivered and key is not None and self._keys[key]:
            self._ready.append(key)
            return []
        return self._end(key)

    def _end(self, key: str | None) -> list[Delivery]:
        """Lets go of a key with all that waits behind it."""
        if key is None:
            return []
        behind = self._keys.pop(key)
        self.waiting -= len(behind)
        return list(behind)

    def clear(self) -> Iterator[Delivery]:
        while self._keyless:
            self.waiting -= 1
            yield self._keyless.popleft()
        # The key of a request under way ends with it.
        for key in [key for key in self._ready if key is not None]:
            queue = self._keys.pop(key)
            self.waiting -= len(queue)
            yield from queue
        self._ready.clear()

    def _pick(self) -> list[Delivery]:
        key = self._ready.popleft()
        if key is None:
            return [self._keyless.popleft()]
        return self._request_of(self._keys[key])
