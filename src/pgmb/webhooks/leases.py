"""A lease of a dispatcher, and the deliveries that are pending under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pgmb.webhooks.request import WebhookEvent


class DeliveryFailure(NamedTuple):
    """A delivery that is to be retried or given up."""

    item: int
    """The event's seq, or the id of the claimed row."""
    endpoint: str
    after: float | None
    """Seconds until the retry; None: by the queue's own retry schedule."""
    error: str | None
    attempted: bool
    """Whether a request was made. Without one, the attempt does not count."""
    last: bool
    """Whether the delivery is given up."""


class Settlement(NamedTuple):
    """Results to settle for a lease."""

    lease: str
    claimed: bool
    done: list[int] | None
    """Items that need no further delivery; None: all that the lease still holds."""
    failures: list[DeliveryFailure]


class Lease:
    """Events received together, each for one or more endpoints, or rows claimed together."""

    __slots__ = (
        "_done",
        "_left",
        "_unsettled",
        "claimed",
        "id",
        "open",
        "reported_at",
        "taken_at",
        "valid_until",
    )

    def __init__(self, lease: str, now: float, valid_until: float, *, claimed: bool) -> None:
        self.id = lease
        self.claimed = claimed
        """Whether its items are rows claimed from `pgmb.delivery`, not events of a queue."""
        self.open = 0
        """Deliveries without a result yet."""
        self.taken_at = self.reported_at = now
        self.valid_until = valid_until
        """By the clock of this process. Later, another dispatcher may hold its items."""
        self._left: dict[int, int] = {}
        self._done: list[int] = []
        self._unsettled: list[DeliveryFailure] = []

    def add(self, item: int, endpoints: int) -> None:
        """Add an item that goes to this number of endpoints."""
        self._left[item] = endpoints
        self.open += endpoints

    def delivered(self, item: int) -> None:
        """Record that an item reached one of its endpoints."""
        self._finish(item)

    def failed(self, failure: DeliveryFailure) -> None:
        """Record that an item did not reach one of its endpoints. The retry does not wait for the others."""
        self._unsettled.append(failure)
        self._finish(failure.item, failed=True)

    def release(self, item: int) -> None:
        """Forget an item: an earlier event of its key failed, and the queue returns both together."""
        del self._left[item]
        self.open -= 1

    def report(self, now: float) -> Settlement | None:
        """The results since the last report; None if there are none."""
        if self.open == 0:
            return Settlement(self.id, self.claimed, self._done if self.claimed else None, self._unsettled)
        if not self._done and not self._unsettled:
            return None
        done, failures, self._done, self._unsettled = self._done, self._unsettled, [], []
        self.reported_at = now
        return Settlement(self.id, self.claimed, done, failures)

    def _finish(self, item: int, *, failed: bool = False) -> None:
        self.open -= 1
        left = self._left[item] - 1
        if left:
            self._left[item] = left
            return
        del self._left[item]
        # An event is done when each of its failures has a row. A row that failed stays.
        if not failed or not self.claimed:
            self._done.append(item)


class WebhookDelivery:
    """One event to be delivered to one endpoint."""

    __slots__ = ("attempt", "event", "item", "lease", "seq")

    def __init__(self, lease: Lease, item: int, seq: int, attempt: int, event: WebhookEvent) -> None:
        self.lease = lease
        self.item = item
        self.seq = seq
        self.attempt = attempt
        self.event = event
