"""One filter that raises among many queues: the others get every event, and its own queue loses none.

Each round gives one queue a filter or condition that raises at one of the events. The queue must come to a
stop there, with the error in view, while all others get everything. Then it is bound to a mended one and
resumed, and must go on exactly where it stopped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pgmb
from harness.states import paused_queues

PATIENCE = 120.0
TOPIC = "counted"


class Kind(NamedTuple):
    """A way to raise at a poisoned payload, the same mended, and what the queue says then."""

    raising: dict[str, Any]
    mended: dict[str, Any]
    said: str


KINDS = (
    Kind(
        {"condition": "(e.payload ->> 'value')::int >= 0"},
        {"condition": "length(e.payload ->> 'value') > 0"},
        'condition failed: invalid input syntax for type integer: "…" (22P02)',
    ),
    Kind(
        {"filter": '$.payload.at.datetime() < "2030-01-01T00:00:00+00".datetime()'},
        {"filter": "exists($.payload.at)"},
        "filter failed: cannot convert value from date to timestamptz",
    ),
)


class Round(NamedTuple):
    """What was published, who was to fail at which of it, and what came of that."""

    numbers: Sequence[int]
    poison: int
    victim: str
    said: str
    paused: Mapping[str, str]
    """The queues that stood still when the others had everything, and why."""
    before: Sequence[int]
    """What the victim got until then."""
    after: Sequence[int]
    """What it got once mended."""
    others: Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Result:
    queues: int
    rounds: list[Round] = field(default_factory=list[Round])
    wrong: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @property
    def held_back(self) -> int:
        return sum(len(one.after) for one in self.rounds)

    @property
    def got_before(self) -> int:
        return sum(len(one.before) for one in self.rounds)

    @property
    def holds(self) -> bool:
        return not self.wrong and bool(self.rounds) and self.held_back >= len(self.rounds)

    def __str__(self) -> str:
        delivered = sum(len(got) for one in self.rounds for got in one.others.values())
        return (
            f"filters {'hold' if self.holds else 'VIOLATED'}: {len(self.rounds)} raised, "
            f"one at a time among {self.queues} queues | {delivered} events to the others, "
            f"{self.got_before} to those that raised before they did, {self.held_back} once mended, "
            f"{len(self.wrong)} wrong"
            + "".join(f"\n  {what}" for what in self.wrong[:20])
            + f" | {self.seconds:.1f} s"
        )


def judge(one: Round) -> list[str]:
    """What is wrong with a round."""
    numbers = list(one.numbers)
    wrong = [
        f"{name} got {len(got)} of {len(numbers)} events, or in another order"
        for name, got in one.others.items()
        if list(got) != numbers
    ]
    if set(one.paused) != {one.victim}:
        wrong.append(f"paused were {dict(one.paused)}, not {one.victim} alone")
    elif not one.paused[one.victim].startswith(one.said):
        wrong.append(f"{one.victim} says {one.paused[one.victim]!r}, not {one.said!r}")
    if one.poison not in one.after:
        wrong.append(f"{one.victim} got the poisoned event {one.poison} with the filter that raises")
    if [*one.before, *one.after] != numbers:
        wrong.append(f"{one.victim} got {list(one.before)}, then {list(one.after)}, of {numbers}")
    return wrong


def create(dsn: str, queues: int) -> list[str]:
    """Queues that all get every event, by a filter, by fields, or by a condition with params of its own."""
    names = [f"queue {number}" for number in range(queues)]
    with pgmb.connect(dsn, max_size=1) as broker, broker.connection() as conn, conn.transaction():
        for number, name in enumerate(names):
            least = {"least": -number}
            asked: tuple[dict[str, Any], ...] = (
                {"filter": "$.payload.number >= $least", "params": least},
                {"equals": {"headers": {"kind": "counted"}}},
                {
                    "condition": "(e.payload ->> 'number')::int >= (s.params ->> 'least')::int",
                    "params": least,
                },
            )
            broker.create_queue(name, [TOPIC], conn=conn, **asked[number % 3])
    return names


def publish(dsn: str, numbers: Sequence[int], poison: int, got: Sequence[int], chance: random.Random) -> None:
    """In transactions of a few events each; the poison not before its victim got half of what precedes it."""
    left = list(numbers)
    deadline = time.monotonic() + PATIENCE
    with pgmb.connect(dsn, max_size=1) as broker:
        while left:
            size = chance.randint(1, 5)
            if poison in left[:size]:
                while len(got) < (len(numbers) - len(left)) // 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
            part, left = left[:size], left[size:]
            broker.publish_many(
                [
                    pgmb.NewEvent(
                        TOPIC,
                        {
                            "number": number,
                            "value": "poison" if number == poison else "1",
                            "at": "2020-01-01" if number == poison else "2020-01-01T00:00:00+00:00",
                        },
                        headers={"kind": "counted"},
                    )
                    for number in part
                ]
            )


def consume(dsn: str, names: Sequence[str], wanted: int, deadline: float) -> dict[str, list[int]]:
    """Receive from each queue until it gave so many; one consumer a queue, so that it sees its order."""
    got: dict[str, list[int]] = {name: [] for name in names}
    short = list(names)
    with pgmb.connect(dsn, max_size=1) as broker:
        while short and time.monotonic() < deadline:
            for name in short:
                lease = broker.receive(name, max=500)
                got[name] += [event.payload["number"] for event in lease]
                lease.ack()
            short = [name for name in short if len(got[name]) < wanted]
    return got


def until_paused(dsn: str, victim: str, got: list[int], deadline: float) -> None:
    """What a queue gives until it stands still."""
    with pgmb.connect(dsn, max_size=1) as broker:
        while victim not in paused(broker) and time.monotonic() < deadline:
            lease = broker.receive(victim, max=500)
            got += [event.payload["number"] for event in lease]
            lease.ack()


def paused(broker: pgmb.Broker) -> dict[str, str]:
    with broker.connection() as conn:
        return {name: reason or "" for name, reason in paused_queues(conn).items()}


def one_round(
    dsn: str, names: Sequence[str], numbers: Sequence[int], consumers: int, chance: random.Random
) -> Round:
    victim, kind, poison = chance.choice(names), chance.choice(KINDS), chance.choice(numbers)
    others = [name for name in names if name != victim]
    deadline = time.monotonic() + PATIENCE
    with pgmb.connect(dsn, max_size=1) as broker, ThreadPoolExecutor(consumers + 1) as threads:
        broker.bind(victim, [TOPIC], **kind.raising)
        reading = [
            threads.submit(consume, dsn, others[part::consumers], len(numbers), deadline)
            for part in range(consumers)
        ]
        before: list[int] = []
        failing = threads.submit(until_paused, dsn, victim, before, deadline)
        publish(dsn, numbers, poison, before, chance)
        got: dict[str, list[int]] = {}
        for part in reading:
            got |= part.result()
        failing.result()
        standing = paused(broker)
        broker.bind(victim, [TOPIC], **kind.mended)
        broker.resume(victim)
        rest = len(numbers) - len(before)
        after = consume(dsn, [victim], rest, time.monotonic() + PATIENCE)[victim] if rest else []
    return Round(numbers, poison, victim, kind.said, standing, before, after, got)


def run(dsn: str, *, queues: int, rounds: int, events: int, consumers: int, seed: int) -> Result:
    began = time.monotonic()
    chance = random.Random(seed)
    result = Result(queues)
    names = create(dsn, queues)
    for number in range(rounds):
        done = one_round(dsn, names, range(number * events, (number + 1) * events), consumers, chance)
        result.rounds.append(done)
        result.wrong += judge(done)
    with pgmb.connect(dsn, max_size=1) as broker:
        # Nothing comes twice, and nobody else came to a stop.
        for name in names:
            if lease := broker.receive(name):
                result.wrong.append(f"{name} gives {len(lease)} more than was published")
        result.wrong += [f"{name} is paused: {reason}" for name, reason in paused(broker).items()]
    result.seconds = time.monotonic() - began
    return result
