"""A queue as it should be: a log in a list, a position as the set of what lies behind it, no clocks, no SQL.

The model is told what was done to the queue and what came of it. It holds what must come (`required`), what
may come, and objects (`Wrong`) to all else.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NEVER = float("inf")
LONG = 1_000_000.0
"""Longer than any run has steps: the delay of what is due "later"."""


class Wrong(AssertionError):  # noqa: N818 - a verdict
    """The queue did what it must not do."""


class Lost(Exception):  # noqa: N818 - an answer, not a failure
    """The model expects that the lease is refused."""


def matches(patterns: Iterable[str], topic: str) -> bool:
    return any(_matches(pattern.split("."), topic.split(".")) for pattern in patterns)


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, *rest = pattern
    if head == "#":
        return any(_matches(rest, words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _matches(rest, words[1:])


@dataclass(slots=True)
class Entry:
    """An event in the log: when it was published, and when committed, if it is."""

    name: int
    topic: str
    published: float
    committed: float = NEVER


@dataclass(slots=True)
class Failure:
    """An event to be tried again: free and due at some time, or leased."""

    name: int
    attempt: int
    due: float
    error: str | None
    lease: str | None = None
    expiries: int = 0
    """How often in a row its lease expired."""

    def comes_alone(self, max_attempts: int) -> bool:
        """It may have crashed its consumer: its lease expired twice, or once before its last attempt."""
        return self.expiries >= 2 or (self.expiries == 1 and self.attempt >= max_attempts)


@dataclass(slots=True)
class Lease:
    """retried: its events are those failures that name it; otherwise `left`."""

    left: set[int]
    retried: bool = False
    lapsed: bool = False
    lost: bool = False
    settled: bool = False
    events: int = 0


@dataclass(slots=True)
class Delivered:
    """What the queue handed out: one row of a receive."""

    lease: str
    seq: int
    name: int
    topic: str
    attempt: int


@dataclass
class Model:
    max_attempts: int
    patterns: list[str]
    step: float = 0
    log: dict[int, Entry] = field(default_factory=dict)
    delayed: dict[int, tuple[str, float]] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    """Did not match when a receive came by. Whether the position went past them is the queue's own affair
    until something later is delivered."""
    leases: dict[str, Lease] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    dead: list[tuple[int, int, str | None]] = field(default_factory=list)
    paused: bool = False
    seqs: dict[int, int] = field(default_factory=dict)
    forgotten: bool = False
    """Maintenance has cleared settled leases: they may be unknown instead of settled."""

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, names: Iterable[int], topics: Iterable[str], *, committed: bool = True) -> None:
        for name, topic in zip(names, topics, strict=True):
            self.step += 1
            self.log[name] = Entry(name, topic, self.step)
        if committed:
            self.commit(names)

    def commit(self, names: Iterable[int]) -> None:
        self.step += 1
        for name in names:
            self.log[name].committed = self.step

    def roll_back(self, names: Iterable[int]) -> None:
        for name in names:
            del self.log[name]

    def delay(self, name: int, topic: str) -> None:
        self.step += 1
        self.delayed[name] = (topic, self.step + LONG)

    def hours_pass(self) -> None:
        """All that was put off until later is due, in its old order."""
        self.step += 1
        self.delayed = {name: (topic, due - 2 * LONG) for name, (topic, due) in self.delayed.items()}
        for failure in self.failures:
            if failure.lease is None and failure.due > self.step:
                failure.due -= 2 * LONG

    def release(self) -> list[int]:
        """What is due enters the log."""
        due = [name for name, (_, due) in self.delayed.items() if due <= self.step]
        for name in sorted(due, key=lambda name: self.delayed[name][1]):
            topic, _ = self.delayed.pop(name)
            self.publish([name], [topic])
        return due

    # -- receiving -------------------------------------------------------------------------------------------

    def committed(self) -> set[int]:
        return {entry.name for entry in self.log.values() if entry.committed <= self.step}

    def waiting(self) -> set[int]:
        """Committed, not behind the position, and matching."""
        return {
            name for name in self.committed() - self.passed if matches(self.patterns, self.log[name].topic)
        }

    def quiet(self) -> bool:
        """Nothing but fresh events is there to be received."""
        lapsed = any(lease.lapsed and not lease.lost and not lease.settled for lease in self.leases.values())
        return not (self.paused or lapsed or self.due() or self.delayed)

    def due(self) -> list[Failure]:
        return [failure for failure in self.failures if failure.due <= self.step]

    def receive(self, rows: Sequence[Delivered], limit: int, own: Iterable[int] = ()) -> None:
        """Judges what a receive gave, and takes note of it.

        `own` were published by its own transaction, which gets them after its commit.
        """
        self.step += 1
        if self.paused:
            require(not rows, "delivered while paused", rows)
            return
        self._expire()
        own = {*own, *self.release()}
        self.step += 1
        require(len(rows) <= limit, "more than asked for", rows)
        require(len({row.lease for row in rows}) <= 1, "one lease a receive", rows)
        require(self._in_order(rows), "order of a lease", rows)
        for row in rows:
            require(row.lease not in self.leases, "an old lease", row)
            require(self.seqs.setdefault(row.name, row.seq) == row.seq, "another seq than before", row)
            require(row.attempt <= self.max_attempts, "more attempts than allowed", row)
        if self._takes_due(rows):
            self._receive_due(rows, limit)
        else:
            self._receive_fresh(rows, own)

    def _in_order(self, rows: Sequence[Delivered]) -> bool:
        return all(a.seq <= b.seq for a, b in itertools.pairwise(rows))

    def _takes_due(self, rows: Sequence[Delivered]) -> bool:
        """Whether a receive gives retried events: those that are due come first."""
        return bool(self.due())

    def _expire(self) -> None:
        """A lease that has ended is lost as a whole, whatever is received of it."""
        for token, lease in self.leases.items():
            if not lease.lapsed or lease.lost or lease.settled:
                continue
            lease.lost = True
            if not lease.retried:
                self._fail(lease.left, 1, self.step, "lease expired", expiries=1)
                continue
            for failure in self._take(token, None):
                said = "lease expired"
                if failure.attempt >= self.max_attempts and failure.error is not None:
                    said += f"; before: {failure.error}"
                self._fail([failure.name], failure.attempt, self.step, said, expiries=failure.expiries + 1)

    def _fail(
        self, names: Iterable[int], attempt: int, due: float, error: str | None, *, expiries: int = 0
    ) -> None:
        for name in names:
            if attempt >= self.max_attempts:
                self.dead.append((name, attempt, error))
            else:
                self.failures.append(Failure(name, attempt + 1, due, error, expiries=expiries))

    def _receive_due(self, rows: Sequence[Delivered], limit: int) -> None:
        due = self.due()
        require(bool(rows), "nothing although something is due", due)
        taken: list[Failure] = []
        for row in rows:
            candidates = [f for f in due if f.name == row.name and not any(f is t for t in taken)]
            candidates = [f for f in candidates if f.attempt == row.attempt]
            require(bool(candidates), "a retry that is not due, or of another attempt", (row, due))
            taken.append(min(candidates, key=lambda failure: failure.due))
        if any(f.comes_alone(self.max_attempts) for f in taken):
            require(len(rows) == 1, "a suspect that does not come alone", (rows, taken))
        elif not any(f.comes_alone(self.max_attempts) for f in due):
            require(len(rows) == min(limit, len(due)), "fewer than are due", (rows, due))
        left = [f for f in due if not any(f is t for t in taken)]
        if left:
            longest = min(failure.due for failure in left)
            require(all(f.due <= longest for f in taken), "waited longest, comes first", (taken, left))
        self.leases[rows[0].lease] = Lease(set(), retried=True)
        for failure in taken:
            failure.lease = rows[0].lease
            failure.due = NEVER

    def _receive_fresh(self, rows: Sequence[Delivered], own: set[int]) -> None:
        waiting = self.waiting() - own
        required = waiting - self.doubtful
        got = [row.name for row in rows]
        require(len(set(got)) == len(got), "twice in one lease", rows)
        require(set(got) <= waiting, "not to be delivered", set(got) - waiting)
        require(bool(got) or not required, "nothing although something waits", required)
        require(all(row.attempt == 1 for row in rows), "a first delivery", rows)
        for row in rows:
            require(row.topic == self.log[row.name].topic, "another topic than published", row)
        order = [self.log[name].published for name in got]
        require(order == sorted(order), "first deliveries in the order of publishing", rows)
        last = max(order, default=-NEVER)
        overtaken = {name for name in required - set(got) if self.log[name].committed < last}
        require(not overtaken, "overtaken by what was published after their commit", (overtaken, rows))
        self.passed |= set(got)
        for name in self.committed() - self.passed - own:
            if name in required:
                continue
            overtaken_for_good = self.log[name].committed < last
            if overtaken_for_good or (not got and name in waiting):
                self.passed.add(name)
            else:
                self.doubtful.add(name)
        self.doubtful -= self.passed
        if rows:
            self.leases[rows[0].lease] = Lease(set(got), events=len(got))

    # -- settling --------------------------------------------------------------------------------------------

    def ack(self, lease: str, names: set[int] | None) -> int:
        """How many events that settles."""
        return len(self._settle(lease, names))

    def fail(self, lease: str, names: set[int] | None, *, later: bool, error: str | None, final: bool) -> int:
        """Retry or, if `final`, bury."""
        self.step += 1
        due = self.step + (LONG if later else 0)
        taken = self._settle(lease, names)
        for failure in taken:
            said = failure.error if error is None else error
            if final:
                self.dead.append((failure.name, failure.attempt, said))
            else:
                self._fail([failure.name], failure.attempt, due, said)
        return len(taken)

    def give_back(self, lease: str, names: set[int] | None) -> int:
        """Release: untried, due at once."""
        self.step += 1
        taken = self._settle(lease, names)
        for failure in taken:
            self.failures.append(Failure(failure.name, failure.attempt, self.step, failure.error))
        return len(taken)

    def extend(self, lease: str, *, lapse: bool) -> None:
        self.step += 1
        held = self._held(lease)
        if held is None:
            raise Lost
        held.lapsed = lapse

    def lose(self, lease: str) -> None:
        """The transaction that received it was superseded."""
        self.leases[lease] = Lease(set(), lost=True)

    def _held(self, lease: str) -> Lease | None:
        held = self.leases.get(lease)
        if held is None or held.lost:
            raise Lost
        return None if held.settled else held

    def _settle(self, lease: str, names: set[int] | None) -> list[Failure]:
        """The events that a call settles, with their attempts."""
        held = self._held(lease)
        if held is None:
            return []
        held.settled = names is None
        if held.retried:
            return self._take(lease, names)
        chosen = held.left if names is None else held.left & names
        # The only event of a lease is all of it.
        held.settled = held.settled or (held.events == 1 and bool(chosen))
        held.left = held.left - chosen
        return [Failure(name, 1, 0, None) for name in chosen]

    def _take(self, lease: str, names: set[int] | None) -> list[Failure]:
        taken = [f for f in self.failures if f.lease == lease and (names is None or f.name in names)]
        self.failures = [f for f in self.failures if not any(f is t for t in taken)]
        return taken

    # -- the operator ----------------------------------------------------------------------------------------

    def seek(self, behind: Iterable[int]) -> None:
        """Moves the position to where `behind` lies behind it."""
        self.passed = set(behind)
        self.doubtful.clear()
        self.failures.clear()
        for lease in self.leases.values():
            lease.lost = lease.lost or not lease.settled

    def redrive(self, patterns: list[str] | None) -> int:
        self.step += 1
        back = [
            (name, attempt, error)
            for name, attempt, error in self.dead
            if patterns is None or matches(patterns, self.log[name].topic)
        ]
        self.dead = [letter for letter in self.dead if letter not in back]
        self.failures.extend(Failure(name, 1, self.step, error) for name, _, error in back)
        return len(back)

    def dead_letters(self, found: Sequence[tuple[int, int, str | None]]) -> None:
        require(Counter(found) == Counter(self.dead), "other dead letters", (found, self.dead))

    def copy(self) -> Model:
        return copy.deepcopy(self)


def require(holds: bool, promise: str, evidence: object) -> None:
    if not holds:
        raise Wrong(f"{promise}: {evidence}")
