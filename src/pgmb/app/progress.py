"""The progress of a lease: how many events it takes, how they are divided, and their state. No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

from pgmb._async.receiving import AsyncLease
from pgmb.types import Event, live

_MOST_EVENTS = 500
_EXTEND_AT_SHARE = 0.4
# A receive does not tell how long its lease is; the queue's lease_for may have changed since it was read.
_FIRST_EXTENSION_SECONDS = 0.5
_SHORT_LEASE_SECONDS = 0.25
_LONG_LEASE_SECONDS = 1.0
# Tenants of a fair queue wait for a lease to end before they are served.
_SHORT_FAIR_LEASE_SECONDS = 0.015
_LONG_FAIR_LEASE_SECONDS = 0.06


class Failure(NamedTuple):
    """How an event failed. `after` None is the queue's own backoff; a final failure is a dead letter."""

    final: bool
    after: float | None
    error: str
    together: int | None = None
    """Events with the same number here come again as the same set."""
    detail: str | None = None
    """The traceback."""
    unhandled_for: float | None = None
    """Of an event that this process cannot handle: how long it waits for another one, in seconds.
    The attempt does not count. If it is final, this is still to be judged (settling.judge_unfit)."""


def extend_after(extended_for: float | None, lease_for: float) -> float:
    """Seconds after which to extend a lease that was extended for so long, or was only received."""
    if extended_for is None:
        return min(lease_for * _EXTEND_AT_SHARE, _FIRST_EXTENSION_SECONDS)
    return extended_for * _EXTEND_AT_SHARE


class LeaseProgress:
    """The events of a lease by their state.

    Successes are not recorded: an event that neither waits, runs nor failed has succeeded.
    """

    __slots__ = (
        "began",
        "behind",
        "blamed",
        "extended_for",
        "failed",
        "given_back",
        "lease",
        "lost",
        "max_attempts",
        "ordered",
        "pending",
        "renewed",
        "settled",
        "suspect",
        "swept",
        "taken",
        "working",
    )

    def __init__(
        self,
        lease: AsyncLease,
        max_attempts: int | None = None,
        *,
        ordered: bool = False,
        suspect: bool = False,
    ) -> None:
        self.lease = lease
        self.max_attempts = max_attempts
        self.ordered = ordered
        self.pending: deque[Event | list[Event]] = deque(live(lease.events))
        """Events, or in an ordered queue lists of events that must run one after another."""
        self.working = 0
        """How many workers take events from it."""
        self.failed: dict[int, Failure] = {}
        self.taken: set[int] = set()
        """What handlers settled in transactions of their own, whose end is not known here."""
        self.settled: set[int] = set()
        self.behind: set[int] = set()
        """In an ordered queue, what followed on a failure: retrying that hands it back."""
        self.given_back: set[int] = set()
        """What was begun and broken off, or not begun at all, to be released."""
        self.blamed: dict[int, object] = {}
        """Of several handlers, which one raised."""
        self.lost = False
        self.extended_for: float | None = None
        """Seconds of the last extension, as the database tells them."""
        self.began = self.renewed = self.swept = time.monotonic()
        self.suspect = suspect
        """Whether it may have crashed its previous consumer."""

    def to_be_extended(self, now: float, lease_for: float) -> bool:
        """Whether it is time. `lease_for`, the queue's as it was read last, may have become shorter."""
        return not self.lost and now - self.renewed > extend_after(self.extended_for, lease_for)

    @property
    def finished(self) -> bool:
        return not self.working and not self.pending

    @property
    def untroubled(self) -> bool:
        """Whether it is finished, and all of it succeeded."""
        return not (
            self.working or self.pending or self.failed or self.taken or self.settled or self.given_back
        )

    def divide(self, into: Callable[[list[Event]], Iterable[list[Event]]]) -> None:
        """Divide what has not started. If that fails, nothing is left to start."""
        events = list(self._pending_events())
        self.pending.clear()
        if events:
            self.pending.extend(into(events))

    def next_batch(self, size: int) -> list[Event]:
        """Take the next set of events, or as many single ones as a call takes."""
        if isinstance(self.pending[0], list):
            return cast("list[Event]", self.pending.popleft())
        return [cast("Event", self.pending.popleft()) for _ in range(min(size, len(self.pending)))]

    def hold_back_behind(self, event: Event) -> None:
        """Hold back what follows on an event that will come again, where the order of its key is kept."""
        if self.ordered and event.key is not None:
            place = self.lease.events.index(event)
            self.behind.update(
                later.seq for later in self.lease.events[place + 1 :] if later.key == event.key
            )

    def drop_refused(self) -> None:
        """Leave of what has not started the events that did not fail and that no failure holds back."""
        left = [event for event in self._pending_events() if self.is_open(event)]
        self.pending.clear()
        self.pending.extend(left)

    def is_open(self, event: Event) -> bool:
        """Whether it neither failed nor is held back behind one that did."""
        return event.seq not in self.failed and event.seq not in self.behind

    def drop_pending(self) -> None:
        """Hand back the events that have not started."""
        self.given_back.update(event.seq for event in self._pending_events())
        self.pending.clear()

    def succeeded(self, running: Iterable[int] = ()) -> list[int]:
        """What may be settled as done and is not yet."""
        others = self.settled | self.taken | self.behind | self.given_back | self.failed.keys() | set(running)
        others.update(event.seq for event in self._pending_events())
        return [event.seq for event in self.lease.events if event.seq not in others]

    def _pending_events(self) -> Iterable[Event]:
        for item in self.pending:
            if isinstance(item, list):
                yield from item
            else:
                yield item


def chains(events: Iterable[Event]) -> list[list[Event]]:
    """Events by key, each key's in their order. Those without a key stand alone."""
    by_key: dict[str, list[Event]] = {}
    every: list[list[Event]] = []
    for event in events:
        chain = by_key.get(event.key) if event.key is not None else None
        if chain is None:
            chain = list[Event]()
            every.append(chain)
            if event.key is not None:
                by_key[event.key] = chain
        chain.append(event)
    return every


SplitBy: TypeAlias = Callable[[list[Event]], Iterable[Sequence[Event]]]
"""Parts of a set, to be handled apart; each event in one of them."""


class SplitError(Exception):
    """What `split_by` returned is not a set's events, each in one part."""


def parts(events: Sequence[Event], split_by: SplitBy | None) -> list[list[Event]]:
    """The parts in which a set is handled. Raises what `split_by` raises, and SplitError."""
    if split_by is None:
        return [list(events)]
    found = [list(part) for part in split_by(list(events))]
    given = sorted(event.seq for event in events)
    taken = sorted(event.seq for part in found for event in part)
    if taken != given:
        raise SplitError(
            f"split_by was given {len(given)} events and returned {len(set(given) & set(taken))} of them"
            f" {len(taken)} times; each must be in one part"
        )
    return [part for part in found if part]


class LeaseSize:
    """Starts with an event a worker, doubles while leases are quickly done, halves when they take long.

    A long lease keeps its last events from other processes, and all of it from being settled.
    """

    def __init__(self, concurrency: int, batch: int | None = None, *, fair: bool = False) -> None:
        self._short = _SHORT_FAIR_LEASE_SECONDS if fair else _SHORT_LEASE_SECONDS
        self._long = _LONG_FAIR_LEASE_SECONDS if fair else _LONG_LEASE_SECONDS
        self._least = batch or concurrency
        self._most = batch or max(concurrency, _MOST_EVENTS)
        self.next = self._least

    def took(self, events: int, seconds: float) -> None:
        """Adapt to a lease of that many events, done in that many seconds."""
        if seconds > self._long:
            self.next = max(self.next // 2, self._least)
        elif seconds < self._short and events >= self.next:
            self.next = min(self.next * 2, self._most)
