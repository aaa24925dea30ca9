"""A consumer that commits its effects with its settling calls, and records every delivery."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from faults.correctness.run import rollback
from faults.correctness.verdict import Ask, Delivery, Ended, History

_RECEIVE = """
select lease, id, seq, key, attempt, extract(epoch from clock_timestamp())::float
from pgmb.receive(%s, %s, %s * interval '1 second', ack => %s)
"""
_EFFECTS = """
insert into app.effect (event, lease, worker, attempt)
select unnest(%s::uuid[]), %s, %s, unnest(%s::int[])
"""

_TRY_AGAIN = ("40001", "40P01", "55P03", "MB013")
"""Serialization failure, deadlock, lock timeout, a queue held by transactions that stay open, as they do on a
busy machine: the transaction may be tried again. How long that takes is judged as a stall."""
_KILLED = ("57014", "57P01", "57P02", "57P03")
"""Cancelled, terminated, crashed, starting."""


@dataclass(slots=True)
class Leased:
    """An event that a lease holds."""

    seq: int
    key: str | None
    delivery: Delivery


@dataclass(slots=True)
class Held:
    """A lease with the events of it that are not settled yet."""

    lease: UUID
    events: list[Leased]


def ended_by(error: psycopg.Error, refusals: Sequence[str] = ()) -> Ended | None:
    """What an error of a settling call means for the events. None: the call may be tried again."""
    state = error.sqlstate
    if state == "MB011":
        return Ended.LOST
    if state in _TRY_AGAIN or state in refusals:
        return None
    if state in _KILLED or (state is None and isinstance(error, psycopg.OperationalError)):
        return Ended.UNKNOWN
    raise error


class Consumer:
    """One connection of a consumer. `refusals`: SQLSTATEs that the run expects besides the usual ones."""

    def __init__(
        self,
        dsn: str,
        queue: str,
        name: str,
        history: History,
        lease_for: float,
        *,
        refusals: Sequence[str] = (),
        repeatable_read: bool = False,
    ) -> None:
        self.name = name
        self._dsn = dsn
        self._queue = queue
        self._history = history
        self._lease_for = lease_for
        self._refusals = refusals
        self._repeatable_read = repeatable_read
        self.connection = self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def receive(self, size: int, *, after: Held | None = None, lease_for: float | None = None) -> Held | None:
        """Receives in a transaction of its own and records the deliveries.

        With `after`, that lease's effects and its ack are part of the same transaction (`ack =>`).
        """
        began, started = time.time(), time.monotonic()
        if after is not None:
            _touch(after.events)
        try:
            if self.connection.info.transaction_status != TransactionStatus.IDLE:
                # A cancellation ended the rollback before.
                rollback(self.connection)
            with self.connection.transaction():
                if after is not None:
                    self.write_effects(after.lease, after.events)
                held = self.take(size, after=after, lease_for=lease_for)
        except psycopg.Error as error:
            self.failed(error, after.events if after is not None else ())
            return None
        finally:
            # By a clock that stands still with the machine: virtual machines are paused and moved.
            self._history.longest_call = max(self._history.longest_call, time.monotonic() - started)
        if after is not None:
            _end(after.events, Ended.SETTLED)
        if held is not None:
            self.record(held)
        else:
            self._history.empty.append(Ask(began, time.time()))
        return held

    def take(self, size: int, *, after: Held | None = None, lease_for: float | None = None) -> Held | None:
        """Receives in the transaction that is open. `record` it once that has committed."""
        began = time.time()
        seconds = lease_for or self._lease_for
        rows = self.connection.execute(
            _RECEIVE, [self._queue, size, seconds, None if after is None else after.lease]
        ).fetchall()
        ended = time.time()
        if not rows:
            return None
        return Held(
            rows[0][0],
            [
                Leased(
                    seq,
                    key,
                    Delivery(event, lease, attempt, at, began + seconds, ended + seconds, asked_at=began),
                )
                for lease, event, seq, key, attempt, at in rows
            ],
        )

    def record(self, held: Held, *, settled: bool = False) -> None:
        """Records deliveries whose receive has committed, and their ack with it if they are `settled`."""
        self._history.deliveries.extend(leased.delivery for leased in held.events)
        if settled:
            _end(held.events, Ended.SETTLED)

    def write_effects(self, lease: UUID, events: Sequence[Leased]) -> None:
        self.connection.execute(
            _EFFECTS,
            [
                [leased.delivery.event for leased in events],
                lease,
                self.name,
                [leased.delivery.attempt for leased in events],
            ],
        )

    def ack(self, held: Held, events: Sequence[Leased] | None = None, *, open_for: float = 0.0) -> bool:
        """Commits effects with the ack of the whole lease, or of some of its events."""
        chosen = held.events if events is None else events
        _touch(chosen)
        try:
            with self.connection.transaction():
                self.write_effects(held.lease, chosen)
                self.call_ack(held, events)
                time.sleep(open_for)
        except psycopg.Error as error:
            self.failed(error, chosen)
            return False
        _end(chosen, Ended.SETTLED)
        return True

    def call_ack(self, held: Held, events: Sequence[Leased] | None = None) -> None:
        seqs = None if events is None else [leased.seq for leased in events]
        self.connection.execute("select pgmb.ack(%s, %s)", [held.lease, seqs])

    def give_back(
        self,
        verb: str,
        held: Held,
        events: Sequence[Leased] | None = None,
        *,
        after: float = 0.0,
        open_for: float = 0.0,
    ) -> bool:
        """Calls retry (due `after` seconds), release or bury for the whole lease or some of its events."""
        chosen = held.events if events is None else events
        _touch(chosen)
        seqs = None if events is None else [leased.seq for leased in events]
        arguments: list[Any] = [held.lease, seqs]
        if verb == "retry":
            arguments.append(after)
        call = f"select pgmb.{verb}(%s, %s" + (", %s * interval '1 second')" if verb == "retry" else ")")
        try:
            with self.connection.transaction():
                self.connection.execute(call, arguments)
                time.sleep(open_for)
        except psycopg.Error as error:
            self.failed(error, chosen)
            return False
        _end(chosen, Ended.SETTLED if verb == "bury" else Ended.RETURNED, after=after)
        return True

    def extend(self, held: Held, seconds: float, *, open_for: float = 0.0) -> bool:
        """Sets the lease to expire in `seconds`, also sooner than before."""
        began = time.time()
        _touch(held.events)
        try:
            with self.connection.transaction():
                self.connection.execute(
                    "select pgmb.extend(%s, %s * interval '1 second')", [held.lease, seconds]
                )
                called = time.time()
                time.sleep(open_for)
        except psycopg.Error as error:
            self.failed(error, held.events)
            return False
        for leased in held.events:
            leased.delivery.expires_from = began + seconds
            # Until the commit the row is locked: no sweep can take it.
            leased.delivery.expires_until = max(called + seconds, time.time())
        return True

    def failed(self, error: psycopg.Error, events: Sequence[Leased]) -> None:
        """Notes what an error means for the events; raises an error that the run does not expect."""
        ended = ended_by(error, self._refusals)
        if ended is not None:
            _end(events, ended)
        if self.connection.closed or self.connection.broken:
            self.connection.close()
            self.connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        connection: psycopg.Connection[Any] = psycopg.connect(
            self._dsn, autocommit=True, application_name=self.name
        )
        if self._repeatable_read:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return connection


def _touch(events: Sequence[Leased]) -> None:
    now = time.time()
    for leased in events:
        leased.delivery.touched_at = min(leased.delivery.touched_at, now)


def _end(events: Sequence[Leased], ended: Ended, after: float = 0.0) -> None:
    now = time.time()
    for leased in events:
        leased.delivery.ended = ended
        leased.delivery.ended_at = now
        if ended is Ended.SETTLED:
            leased.delivery.settled_by = now
        leased.delivery.due_at = now + after
