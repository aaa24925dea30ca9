"""The checker: compares what publishers committed with the effects that consumers committed. No I/O.

An effect is a row that a handler wrote in the transaction of its settling call. Every committed event must
end as exactly one effect or one dead letter. A second delivery needs a reason. In an ordered queue events of
one key must take effect in publishing order. No receive may come back empty while an event is deliverable.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

LONGEST_STALL = 2.0
"""Seconds for which a deliverable event may stay undelivered although consumers ask for it."""


@dataclass(frozen=True, slots=True)
class Published:
    """A committed event. `number` rises along `key` in publishing order; `at` is a time after the commit."""

    event: UUID
    queue: str
    key: str | None
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class Effect:
    """A row that a handler committed with its settling call."""

    event: UUID
    lease: UUID
    at: float


class Ended(enum.Enum):
    """How a consumer's hold on a delivered event ended, as far as the consumer knows."""

    HELD = "held until the lease expires"
    SETTLED = "settled"
    RETURNED = "retried or released"
    LOST = "refused as lost"
    UNKNOWN = "the connection or statement was killed"


@dataclass(slots=True)
class Delivery:
    """One delivery of one event by a committed receive. Times are seconds since the epoch."""

    event: UUID
    lease: UUID
    attempt: int
    at: float
    expires_from: float
    """The lease cannot have expired earlier than this."""
    expires_until: float
    """The lease has expired by this time."""
    ended: Ended = Ended.HELD
    ended_at: float = math.inf
    settled_by: float = -math.inf
    """When the consumer knew that its settling call had committed."""
    due_at: float | None = None
    """When a returned event is due again."""
    asked_at: float = -math.inf
    """Before its receive was called."""
    touched_at: float = math.inf
    """Before the first call that may have settled it. Until then its lease holds, if it has not expired."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A receive that returned nothing."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation of a queue that was opened: it goes on from the claim `base`."""

    number: int
    base: int
    opened_at: float


@dataclass(slots=True)
class History:
    """What the consumers of one queue recorded."""

    queue: str
    deliveries: list[Delivery] = field(default_factory=list)
    empty: list[Ask] = field(default_factory=list)
    longest_call: float = 0.0
    superseding: bool = False
    """Whether transactions stay open after a receive, so that leases may be lost before they expire."""
    generations: Sequence[Generation] = ()
    """The generations of the queue that were opened, as its rows have them after the run."""
    ordered: bool = False
    """Whether events of one key must take effect in publishing order."""
    always_answers: bool = True
    """Whether a receive must return something while an event is deliverable: a limit may forbid it."""
    since: float = 0.0
    """Nothing counts as deliverable before this time: the database was away."""


@dataclass(frozen=True, slots=True)
class Verdict:
    events: int
    lost: Sequence[UUID]
    doubled: Sequence[UUID]
    phantom: Sequence[UUID]
    unexplained: Sequence[UUID]
    disordered: Sequence[UUID]
    longest_stall: float
    deliveries: int = 0
    dead: int = 0

    @property
    def holds(self) -> bool:
        return (
            self.events > 0
            and self.longest_stall < LONGEST_STALL
            and not (self.lost or self.doubled or self.phantom or self.unexplained or self.disordered)
        )

    def __str__(self) -> str:
        return (
            f"{self.events} events, {len(self.lost)} lost, {len(self.doubled)} doubled, "
            + (f"{len(self.phantom)} phantom, " if self.phantom else "")
            + f"{len(self.unexplained)} unexplained, {len(self.disordered)} out of order, "
            f"longest stall {self.longest_stall:.1f} s"
        )


def judge(
    published: Iterable[Published],
    effects: Iterable[Effect],
    dead: Iterable[UUID],
    histories: Iterable[History],
) -> Verdict:
    """The verdict on a run that has been drained: an event without effect or dead letter counts as lost."""
    events = {one.event: one for one in published}
    effects = sorted(effects, key=lambda effect: effect.at)
    ends = Counter(effect.event for effect in effects)
    settled_by = {(effect.event, effect.lease): effect.at for effect in effects}
    dead = list(dead)
    ends.update(dead)
    unexplained: list[UUID] = []
    disordered: list[UUID] = []
    longest_stall, made = 0.0, 0
    for history in histories:
        deliveries: dict[UUID, list[Delivery]] = {}
        for delivery in sorted(history.deliveries, key=lambda delivery: delivery.at):
            if (delivery.event, delivery.lease) in settled_by:
                # The effect is the proof, also where the answer to the commit was lost.
                delivery.ended = Ended.SETTLED
                delivery.ended_at = min(delivery.ended_at, settled_by[delivery.event, delivery.lease])
            deliveries.setdefault(delivery.event, []).append(delivery)
        made += len(history.deliveries)
        unexplained += [event for event, each in deliveries.items() if not _all_explained(each, history)]
        of_queue = {name: one for name, one in events.items() if one.queue == history.queue}
        stall = _longest_stall(of_queue, deliveries, history) if history.always_answers else 0.0
        longest_stall = max(longest_stall, history.longest_call, stall)
        if history.ordered:
            disordered += _disordered(effects, of_queue)
    return Verdict(
        events=len(events),
        lost=[event for event in events if not ends[event]],
        doubled=[event for event, count in ends.items() if count > 1],
        phantom=[event for event in ends if event not in events],
        unexplained=unexplained,
        disordered=disordered,
        longest_stall=longest_stall,
        deliveries=made,
        dead=len(dead),
    )


def _all_explained(made: Sequence[Delivery], history: History) -> bool:
    """Whether each delivery of an event but the last gave a reason for the next."""
    return all(_explains(one, two, history) for one, two in itertools.pairwise(made))


def _explains(one: Delivery, two: Delivery, history: History) -> bool:
    match one.ended:
        case Ended.RETURNED | Ended.UNKNOWN:
            return True
        case Ended.SETTLED:
            # A transaction that supersedes another may be superseded itself: the first lease holds again. The
            # rows must show it, and that it happened before the second delivery if the settlement did.
            void_since = superseded_at(two.lease, history.generations)
            return two.ended is not Ended.SETTLED and (
                void_since < math.inf if two.at < one.settled_by else void_since <= two.at
            )
        case Ended.HELD | Ended.LOST:
            # On a machine that stalls, a receive may be superseded although no program means it to.
            void_since = superseded_at(one.lease, history.generations)
            return history.superseding or two.at >= min(one.expires_from, void_since)


def superseded_at(lease: UUID, generations: Sequence[Generation]) -> float:
    """When a generation was opened that makes a lease's claim void; never, if none does.

    The newest generation counts, and so does each that contains the base of one that counts. Those void
    claims of older generations that come after their base.
    """
    claim = int(lease.hex[6:22], 16)
    by_number = {one.number: one for one in generations}
    counts = by_number.get(max(by_number, default=-1))
    since = math.inf
    while counts is not None and counts.number > claim >> 40:
        if counts.base < claim:
            since = counts.opened_at
        counts = by_number.get(counts.base >> 40)
    return since


def _disordered(effects: Sequence[Effect], events: Mapping[UUID, Published]) -> list[UUID]:
    """Events that took effect after a later event of their key."""
    newest: dict[str, int] = {}
    found = []
    for effect in effects:
        event = events.get(effect.event)
        if event is None or event.key is None:
            continue
        if event.number < newest.get(event.key, -1):
            found.append(event.event)
        newest[event.key] = max(event.number, newest.get(event.key, -1))
    return found


def _longest_stall(
    events: Mapping[UUID, Published],
    deliveries: Mapping[UUID, Sequence[Delivery]],
    history: History,
) -> float:
    """The longest time after which a receive still returned nothing although an event was deliverable."""
    asks = sorted(history.empty, key=lambda ask: ask.began)
    began = [ask.began for ask in asks]
    # In an ordered queue an event is deliverable once those ahead of it in its key are settled.
    free_from: dict[UUID, float] = {}
    if history.ordered:
        free: dict[str, float] = {}
        for event in sorted(events.values(), key=lambda event: event.number):
            if event.key is not None:
                free_from[event.event] = free.get(event.key, 0.0)
                free[event.key] = max(free.get(event.key, 0.0), _settled_at(deliveries.get(event.event, ())))
    longest = 0.0
    for event in events.values():
        made = deliveries.get(event.event, ())
        waits = [(event.at, made[0].at if made else math.inf)]
        waits += [(_free_at(one), two.at) for one, two in itertools.pairwise(made)]
        if made:
            waits.append((_free_at(made[-1]), math.inf))
        # A transaction that was superseded may have been given the event too, before or after.
        settled = min((one.ended_at for one in made if one.ended is Ended.SETTLED), default=math.inf)
        for start, end in waits:
            since = max(start, free_from.get(event.event, 0.0), history.since)
            if since < settled:
                longest = max(longest, _asked_in_vain(asks, began, since, min(end, settled)))
    return longest


def _settled_at(made: Sequence[Delivery]) -> float:
    return made[-1].ended_at if made and made[-1].ended is Ended.SETTLED else math.inf


def _free_at(delivery: Delivery) -> float:
    """By when a delivered event is deliverable again; never, if it is settled."""
    match delivery.ended:
        case Ended.SETTLED:
            return math.inf
        case Ended.RETURNED:
            assert delivery.due_at is not None
            return delivery.due_at
        case Ended.HELD | Ended.LOST | Ended.UNKNOWN:
            return delivery.expires_until


def _asked_in_vain(asks: Sequence[Ask], began: Sequence[float], since: float, until: float) -> float:
    """How long after `since` the last receive began that returned nothing before `until`."""
    if since == math.inf:
        return 0.0
    place = bisect.bisect_left(began, until) - 1
    while place >= 0 and asks[place].ended >= until:
        place -= 1
    return max(0.0, asks[place].began - since) if place >= 0 else 0.0
