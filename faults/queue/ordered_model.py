"""An ordered queue as it should be: who may come next of each key, and who holds what. No clocks, no SQL.

The model is told what was done to the queue and what came of it, and objects (`Wrong`) to what must not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from faults.queue.model import Delivered, Lost, Wrong

LATER = 1 << 30


@dataclass(slots=True)
class Entry:
    """An event: when it was published and committed, how often it was tried, and where it is now."""

    name: int
    key: str | None
    published: int
    committed: int
    tried: int = 0
    due: int = 0
    lease: str | None = None
    ended: bool = False
    """Settled, or a dead letter."""
    redriven: bool = False


@dataclass(slots=True)
class Lease:
    """retried: of events that have rows of their own. closed: settled as a whole."""

    names: list[int]
    retried: bool
    lapsed: bool = False
    lost: bool = False
    closed: bool = False


@dataclass
class OrderedModel:
    max_attempts: int
    step: int = 0
    log: dict[int, Entry] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    dead: dict[int, int] = field(default_factory=dict)

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, names: Iterable[int], keys: Iterable[str | None], *, committed: bool = True) -> None:
        for name, key in zip(names, keys, strict=True):
            self.step += 1
            self.log[name] = Entry(name, key, self.step, LATER)
        if committed:
            self.commit(names)

    def commit(self, names: Iterable[int]) -> None:
        self.step += 1
        for name in names:
            self.log[name].committed = self.step

    def roll_back(self, names: Iterable[int]) -> None:
        for name in names:
            del self.log[name]

    def hours_pass(self) -> None:
        for entry in self.log.values():
            entry.due = 0

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, rows: Sequence[Delivered], limit: int, *, retried: bool) -> None:
        self.step += 1
        self._expire()
        _require(len(rows) <= limit, "more than asked for", rows)
        _require(len({row.lease for row in rows}) <= 1, "one lease a receive", rows)
        if not rows:
            _require(not self.deliverable(), "nothing although something could come", self.deliverable())
            return
        lease = rows[0].lease
        _require(lease not in self.leases, "an old lease", lease)
        held = self.held_keys()
        for row in rows:
            entry = self.log[row.name]
            _require(entry.committed <= self.step, "not committed", row)
            _require(not entry.ended and entry.lease is None, "settled or held", (row, entry))
            _require(not entry.due, "not due", (row, entry))
            _require(entry.key is None or entry.key not in held, "its key is held by another lease", row)
            ahead = [other for other in self.ahead_of(entry) if other.lease != lease]
            _require(not ahead, "overtakes", (row, ahead))
            _require(row.attempt == entry.tried + 1 <= self.max_attempts, "another attempt", (row, entry))
            entry.lease = lease
        self.leases[lease] = Lease([row.name for row in rows], retried)

    def held_keys(self) -> set[str]:
        return {entry.key for entry in self.log.values() if entry.lease is not None and entry.key is not None}

    def ahead_of(self, entry: Entry) -> list[Entry]:
        """What must be settled before it. Of two whose transactions ran at once neither is."""
        if entry.key is None:
            return []
        return [
            other
            for other in self.log.values()
            if other.key == entry.key
            and not other.ended
            and other is not entry
            and (other.committed < entry.published if other.redriven == entry.redriven else other.redriven)
        ]

    def deliverable(self) -> list[Entry]:
        """What a receive must find one of."""
        # A lease of fresh events holds all its keys until the last of its events is settled.
        held = self.held_keys() | {
            self.log[name].key
            for token, lease in self.leases.items()
            if not lease.retried and self._left(token)
            for name in lease.names
        }
        # Of a key with transactions that ran at once it is open which one comes first, and when that is due.
        put_off = {entry.key for entry in self.log.values() if entry.due and not entry.ended}
        return [
            entry
            for entry in self.log.values()
            if entry.committed <= self.step
            and not entry.ended
            and entry.lease is None
            and not entry.due
            and (entry.key is None or (entry.key not in held and entry.key not in put_off))
        ]

    def _expire(self) -> None:
        """A lease that has ended is taken back as a whole by the next receive, whatever that gives."""
        for token, lease in self.leases.items():
            if lease.lapsed and not lease.lost and not lease.closed:
                lease.lost = True
                for entry in self._left(token):
                    self._failed(entry, due=0)

    # -- settling --------------------------------------------------------------------------------------------

    def settle(self, lease: str, names: set[int] | None, how: str, *, later: bool = False) -> int:
        """ack, bury, retry or release; how many events that settles."""
        held = self._held(lease)
        left = self._left(lease)
        chosen = [entry for entry in left if names is None or entry.name in names]
        # The only event of a lease is all of it; retried events have rows of their own.
        alone = len(held.names) == 1 and not held.retried
        held.closed = held.closed or names is None or (alone and bool(chosen))
        for entry in chosen:
            if how == "ack":
                entry.ended, entry.lease = True, None
            elif how == "bury":
                self._bury(entry, entry.tried + 1)
            elif how == "release":
                entry.lease = None
            else:
                self._failed(entry, due=LATER if later else 0)
        if how in ("retry", "release"):
            # What the lease holds behind them goes back too, untried; unless they are dead letters by now.
            for entry in self._left(lease):
                if any(
                    entry.key is not None and entry.key == other.key and left.index(other) < left.index(entry)
                    for other in chosen
                    if not (held.retried and other.ended)
                ):
                    entry.lease = None
        return len(chosen)

    def lapse(self, lease: str) -> None:
        held = self._held(lease)
        if held.closed:
            raise Lost
        held.lapsed = True

    def _held(self, lease: str) -> Lease:
        held = self.leases[lease]
        if held.lost:
            raise Lost
        return held

    def _left(self, lease: str) -> list[Entry]:
        """In the order of delivery."""
        return [self.log[name] for name in self.leases[lease].names if self.log[name].lease == lease]

    def _failed(self, entry: Entry, *, due: int) -> None:
        entry.tried += 1
        entry.lease = None
        entry.due = due
        if entry.tried >= self.max_attempts:
            self._bury(entry, entry.tried)

    def _bury(self, entry: Entry, attempt: int) -> None:
        entry.ended, entry.lease, entry.tried, entry.due = True, None, 0, 0
        entry.redriven = False
        self.dead[entry.name] = attempt

    # -- the operator ----------------------------------------------------------------------------------------

    def dead_letters(self, found: dict[int, int]) -> None:
        _require(found == self.dead, "other dead letters", (found, self.dead))

    def redrive(self) -> int:
        self.step += 1
        for name in self.dead:
            self.log[name].ended = False
            self.log[name].redriven = True
        count = len(self.dead)
        self.dead.clear()
        return count

    def unfinished(self) -> list[Entry]:
        return [entry for entry in self.log.values() if not entry.ended]


def _require(holds: bool, promise: str, evidence: object) -> None:
    if not holds:
        raise Wrong(f"{promise}: {evidence}")
