"""Events under leases, each on its way to endpoints, and what became of them. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pgmb.delivery.endpoint import Posted
    from pgmb.delivery.lane import Lane


class Failure(NamedTuple):
    """A delivery that waits for another try, or is given up."""

    name: int
    """The event's seq, or the number of the row that waited."""
    endpoint: str
    after: float | None
    """In how many seconds; None: as the queue says."""
    error: str | None
    tried: bool
    last: bool


class Report(NamedTuple):
    """What is to be settled of a lease."""

    lease: str
    waited: bool
    done: list[int] | None
    """Events, or rows, that are done with; None: all that the lease still holds."""
    failures: list[Failure]


class Lease:
    """Events that were received together. Those of a shared queue may each be for many endpoints."""

    __slots__ = (
        "_done",
        "_failures",
        "_left",
        "_unsettled",
        "id",
        "open",
        "reported_at",
        "taken_at",
        "waited",
    )

    def __init__(self, lease: str, now: float, *, waited: bool) -> None:
        self.id = lease
        self.waited = waited
        """Whether it is of rows that waited for one endpoint each, not of events of a queue."""
        self.open = 0
        """Deliveries that nothing is known of yet."""
        self.taken_at = self.reported_at = now
        self._left: dict[int, int] = {}
        self._failures: dict[int, list[Failure]] = {}
        self._done: list[int] = []
        self._unsettled: list[Failure] = []

    def add(self, name: int, endpoints: int) -> None:
        """One more event, or row, and for how many endpoints it is."""
        self._left[name] = endpoints
        self.open += endpoints

    def delivered(self, name: int) -> None:
        """It reached one endpoint."""
        self._finish(name)

    def failed(self, failure: Failure) -> None:
        """It did not reach one endpoint."""
        self._failures.setdefault(failure.name, []).append(failure)
        self._finish(failure.name)

    def left_behind(self, name: int) -> None:
        """It goes back with the event of its key that failed before it."""
        del self._left[name]
        self.open -= 1

    def report(self, now: float) -> Report | None:
        """What became of it since the last report."""
        if self.open == 0:
            return Report(self.id, self.waited, self._done if self.waited else None, self._unsettled)
        if not self._done and not self._unsettled:
            return None
        done, failures, self._done, self._unsettled = self._done, self._unsettled, [], []
        self.reported_at = now
        return Report(self.id, self.waited, done, failures)

    def _finish(self, name: int) -> None:
        self.open -= 1
        left = self._left[name] - 1
        if left:
            self._left[name] = left
            return
        del self._left[name]
        failures = self._failures.pop(name, None)
        if failures is not None:
            self._unsettled += failures
        # A row that failed is no longer done with; an event is, once what failed waits in a row of its own.
        if failures is None or not self.waited:
            self._done.append(name)


class Delivery:
    """One event on its way to one endpoint."""

    __slots__ = ("attempt", "event", "lane", "lease", "name", "seq")

    def __init__(self, lane: Lane, lease: Lease, name: int, seq: int, attempt: int, event: Posted) -> None:
        self.lane = lane
        self.lease = lease
        self.name = name
        self.seq = seq
        self.attempt = attempt
        self.event = event
