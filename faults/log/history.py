"""What publishers know and what readers got, and the judgement of it.

A publisher knows of each transaction that it committed, that it rolled back, or nothing (the answer was
lost). A reader writes down every delivery. `judge` then says what is missing, what was never published,
what came twice without a reason, and what came out of order.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """An event as its publisher knows it. `order` rises along `key` in the order of the commits."""

    name: int
    key: str
    order: int
    topic: str


class Outcome(enum.Enum):
    UNKNOWN = "unknown"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


@dataclass(slots=True)
class Transaction:
    """Events that stand or fall together; unknown until the publisher says otherwise."""

    events: list[Event] = field(default_factory=list)
    outcome: Outcome = Outcome.UNKNOWN


class Publisher:
    """The transactions of one publishing session, in their order."""

    def __init__(self) -> None:
        self.transactions: list[Transaction] = []

    def begin(self) -> Transaction:
        transaction = Transaction()
        self.transactions.append(transaction)
        return transaction


@dataclass(slots=True)
class Delivery:
    """One delivery of one event. `turn` rises with the order in which the reader's position moved."""

    event: int
    turn: int
    attempt: int = 1
    settled: bool = False
    """Whether the consumer was told that its ack is committed: the event must not come again."""


class Reader:
    """What one reader (a queue with all of its consumers, or a position) got.

    `once`: nothing was killed and no lease expired, so every repetition is a fault. Otherwise a repetition is
    explained unless an earlier delivery was settled for certain.
    """

    def __init__(self, name: str, *, wants: Callable[[Event], bool] | None = None, once: bool = True) -> None:
        self.name = name
        self.wants = wants or (lambda event: True)
        self.once = once
        self.deliveries: list[Delivery] = []
        self.put_aside: set[int] = set()
        """Events accounted for without a delivery on record: dead letters, or still waiting at the end."""

    def got(self, names: Iterable[int], turn: int, attempt: int = 1) -> list[Delivery]:
        fresh = [Delivery(name, turn, attempt) for name in names]
        self.deliveries.extend(fresh)
        return fresh


@dataclass(frozen=True, slots=True)
class Findings:
    """The judgement of one reader, each list holding events by name."""

    reader: str
    delivered: int
    missed: list[int]
    phantom: list[int]
    repeated: list[int]
    explained: int
    disordered: list[int]

    @property
    def clean(self) -> bool:
        return not (self.missed or self.phantom or self.repeated or self.disordered)

    def __str__(self) -> str:
        return (
            f"{self.reader}: {self.delivered} delivered, {len(self.missed)} missed, "
            f"{len(self.phantom)} phantom, {len(self.repeated)} repeated"
            + (f" ({self.explained} more with a reason)" if self.explained else "")
            + f", {len(self.disordered)} out of order"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    committed: int
    rolled_back: int
    unknown: int
    findings: Sequence[Findings]

    @property
    def clean(self) -> bool:
        return all(finding.clean for finding in self.findings)

    def of(self, reader: str) -> Findings:
        return next(finding for finding in self.findings if finding.reader == reader)

    def __str__(self) -> str:
        return (
            f"{self.committed} committed, {self.rolled_back} rolled back, {self.unknown} unknown | "
            + " | ".join(map(str, self.findings))
        )


def judge(publishers: Iterable[Publisher], readers: Iterable[Reader]) -> Verdict:
    events: dict[int, Event] = {}
    by_outcome: dict[Outcome, set[int]] = {outcome: set() for outcome in Outcome}
    for publisher in publishers:
        for transaction in publisher.transactions:
            by_outcome[transaction.outcome].update(event.name for event in transaction.events)
            events.update((event.name, event) for event in transaction.events)
    committed = by_outcome[Outcome.COMMITTED]
    possible = committed | by_outcome[Outcome.UNKNOWN]
    return Verdict(
        committed=len(committed),
        rolled_back=len(by_outcome[Outcome.ROLLED_BACK]),
        unknown=len(by_outcome[Outcome.UNKNOWN]),
        findings=[_judge_reader(reader, events, committed, possible) for reader in readers],
    )


def _judge_reader(
    reader: Reader, events: dict[int, Event], committed: Collection[int], possible: Collection[int]
) -> Findings:
    seen: Counter[int] = Counter(delivery.event for delivery in reader.deliveries)
    missed = [
        name
        for name in committed
        if name not in seen and name not in reader.put_aside and reader.wants(events[name])
    ]
    phantom = [name for name in seen if name not in possible or not reader.wants(events[name])]
    repeated, explained = _repetitions(reader)
    return Findings(
        reader=reader.name,
        delivered=len(reader.deliveries),
        missed=sorted(missed),
        phantom=sorted(phantom),
        repeated=repeated,
        explained=explained,
        disordered=_disorder(reader, events),
    )


def _repetitions(reader: Reader) -> tuple[list[int], int]:
    """Deliveries of an event that had been settled before, and the number of those with a reason.

    In which order two consumers wrote down their deliveries is not known, so at most one delivery of an event
    may be the settled one, and it must be the one of the highest attempt.
    """
    of_event: dict[int, list[Delivery]] = {}
    for delivery in reader.deliveries:
        of_event.setdefault(delivery.event, []).append(delivery)
    repeated: list[int] = []
    explained = 0
    for name, deliveries in of_event.items():
        if len(deliveries) == 1:
            continue
        settled = [delivery for delivery in deliveries if delivery.settled]
        last = max(delivery.attempt for delivery in deliveries)
        if reader.once or len(settled) > 1 or any(delivery.attempt < last for delivery in settled):
            repeated.append(name)
        else:
            explained += len(deliveries) - 1
    return repeated, explained


def _disorder(reader: Reader, events: dict[int, Event]) -> list[int]:
    """First deliveries that came after a later event of their key."""
    disordered: list[int] = []
    newest: dict[str, int] = {}
    known: set[int] = set()
    for delivery in sorted(reader.deliveries, key=lambda delivery: delivery.turn):
        event = events.get(delivery.event)
        # A repetition says nothing about order; of a killed consumer's first deliveries nobody knows.
        if event is None or delivery.attempt > 1 or event.name in known:
            continue
        known.add(event.name)
        if event.order <= newest.get(event.key, -1):
            disordered.append(event.name)
        newest[event.key] = max(event.order, newest.get(event.key, -1))
    return disordered
