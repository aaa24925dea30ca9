"""Receive events under a lease, settle them, and read dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, LiteralString, Self, cast
from uuid import UUID

import psycopg
from psycopg import errors

from pgmb._async.calls import AsyncCalls
from pgmb._core import statements, wire
from pgmb._core.claiming import Claiming
from pgmb._core.lease import LeaseNumbers
from pgmb._core.statements import call, seqs_of
from pgmb.errors import PermissionDenied, PgmbError, TimeoutRequired
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import DeadLetter, Duration, Event, Heartbeat, Source, moment

NO_LEASE = UUID(int=0)
LEASE_EVENTS = 20_000
"""How many events a lease holds at most, as in `pgmb_internal.lease_events`."""
_GIVING_BACK = ("retry", "release")
"""What makes events due again."""


class AsyncLease:
    """Events of a queue, held until they are settled or the lease expires. Without events it is false.

    `ack`, `retry` and `bury` take one event, several, or none for all that are left. All of them raise
    LeaseLost when the lease expired and was taken over.

    At the end of `with`, the events that are left are acked; after an exception, they are retried.
    """

    __slots__ = ("_broker", "events", "id", "queue")

    def __init__(self, broker: AsyncReceiving, queue: str, id: UUID, events: list[Event]) -> None:
        self._broker = broker
        self.queue = queue
        self.id = id
        self.events = events

    async def ack(
        self,
        events: Event | Iterable[Event | int] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Settle as done. An empty list settles nothing. Returns how many."""
        return await self._broker.ack(self, seqs_of(events), conn=conn)

    async def retry(
        self,
        events: Event | Iterable[Event | int] | None = None,
        after: Duration | None = None,
        error: str | None = None,
        together: bool | None = None,
        detail: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Try again later, by default after the queue's backoff; `together` as the same set. How many."""
        return await self._broker.retry(self, seqs_of(events), after, error, together, detail, conn=conn)

    async def bury(
        self,
        events: Event | Iterable[Event | int] | None = None,
        error: str | None = None,
        detail: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Give up: to the queue's dead letters. Returns how many."""
        return await self._broker.bury(self, seqs_of(events), error, detail, conn=conn)

    async def release(
        self,
        events: Event | Iterable[Event | int] | None = None,
        after: Duration | None = None,
        error: str | None = None,
        bury_after: Duration | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Give back untried, as the broker's `release` does: due at once, or later. Returns how many."""
        return await self._broker.release(self, seqs_of(events), after, error, bury_after, conn=conn)

    async def extend(
        self, lease_for: Duration | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> datetime:
        """Prolong it, from now. Returns when it expires."""
        return await self._broker.extend(self, lease_for, conn=conn)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.events:
            return
        if error is None:
            await self.ack()
            return
        try:
            await self.retry(error=f"{type(error).__name__}: {error}")
        except (PgmbError, psycopg.Error) as lost:
            # The first error is the one to see. The events come again when the lease has expired.
            error.add_note(f"The lease was not given back: {lost}")

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, {len(self.events)} events>"


class AsyncReceiving(AsyncCalls):
    async def receive(
        self,
        queue: str,
        max: int = 100,
        lease_for: Duration | None = None,
        ack: AsyncLease | UUID | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> AsyncLease:
        """The next events of a queue, at most `max`, leased for `lease_for` (default: the queue's own).

        A lease has at most 20,000 events, and fewer where they are large: it ends at about 32 MiB.
        What is not settled in time is delivered again. With nothing to receive the lease is empty, and false.
        `ack` settles an earlier lease in the same round trip and commit. Meant for a transaction of its own:
        in `conn`, finish within a second, or others pass by and settling or committing fails with LeaseLost.
        """
        with self.observer.receiving(queue) as observed:
            earlier = _lease_id(ack)
            max = min(max, LEASE_EVENTS)
            lease = await self._claimed(queue, max, lease_for, earlier) if conn is None else None
            if lease is None:
                lease = await self._received(queue, max, lease_for, earlier, conn)
            observed.events = lease.events
        return lease

    async def _claimed(
        self, queue: str, limit: int, lease_for: Duration | None, ack: UUID | None
    ) -> AsyncLease | None:
        """The next events by the statement that claims and reads; None: nothing was done, call `receive`."""
        claiming = self._known.claiming.get(queue)
        if claiming is None:
            return None
        while claim := claiming.next(limit, lease_for, ack):
            try:
                rows = await self._rows(claim.statement, None)
            except (PermissionDenied, errors.UndefinedTable):
                # The right to read the stream was revoked, or the segment is gone.
                rows = []
            made = claiming.claimed(claim, rows)
            if made is not None:
                return (
                    await self._lease(queue, bytes(made), rows)
                    if made.claim
                    else AsyncLease(self, queue, NO_LEASE, [])
                )
        return None

    async def _received(
        self,
        queue: str,
        limit: int,
        lease_for: Duration | None,
        ack: UUID | None,
        conn: AsyncConnectionLike | None,
    ) -> AsyncLease:
        """The next events by `pgmb.receive`."""
        statement = statements.receive(queue, limit, lease_for, ack, alone=conn is None)
        rows, sources = await self._rows_in_time((queue,), statement, conn)
        if not rows:
            return AsyncLease(self, queue, NO_LEASE, [])
        if conn is None:
            await self._note(queue, rows, limit)
        return await self._lease(queue, rows[0][-1], rows, sources)

    async def _note(self, queue: str, rows: list[wire.Row], limit: int) -> None:
        """What a lease tells of the next one."""
        identity = LeaseNumbers.of(rows[0][-1]).queue
        known = self._known.claiming
        claiming = known.get(queue)
        if claiming is None or claiming.queue != identity:
            options = cast("dict[str, Any]", self._pool.kwargs)
            stream = None
            # Without prepared statements, planning would cost more than is saved.
            if options.get("prepare_threshold", 0) is not None:
                with suppress(PgmbError, errors.UndefinedFunction):
                    stream = await self._value(statements.claims_from(queue), None)
            self._known.make_room()
            claiming = known[queue] = Claiming(identity, stream)
        claiming.received(rows, limit)

    async def receive_any(
        self,
        queues: Iterable[str],
        max: int = 100,
        lease_for: Duration | None = None,
        *,
        heartbeat: Heartbeat | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> AsyncLease:
        """What the first of several queues gives that has something: one look at all of them.

        `lease.queue` says which. With nothing in any of them the lease is empty, and false. `heartbeat` says
        in the same statement that a worker lives.
        """
        with self.observer.receiving(None) as observed:
            names = list(queues)
            statement = statements.receive_any(names, max, lease_for, heartbeat, alone=conn is None)
            rows, sources = await self._rows_in_time(names, statement, conn)
            if not rows:
                return AsyncLease(self, "", NO_LEASE, [])
            lease = await self._lease(rows[0][-1], rows[0][-2], [row[:-1] for row in rows], sources)
            observed.queue, observed.events = lease.queue, lease.events
        return lease

    async def _rows_in_time(
        self, queues: Sequence[str], statement: statements.Statement, conn: AsyncConnectionLike | None
    ) -> tuple[list[wire.Row], Mapping[str, Source]]:
        """The rows that a statement receives, under a time limit where a queue has an SQL condition.

        Of a caller's connection also what the queues read: it may lead to another database.
        """
        if conn is not None:
            # An error would end the caller's transaction: ask first.
            found = {queue: await self._look_up(queue, conn) for queue in queues}
            read = self._timed_rows if any(timed for _, timed in found.values()) else self._rows
            return await read(statement, conn), {queue: source for queue, (source, _) in found.items()}
        known = self._known.timed
        if not any(known.get(queue) for queue in queues):
            try:
                return await self._rows(statement, None), {}
            except TimeoutRequired:
                self._known.make_room()
                for queue in queues:
                    _, known[queue] = await self._look_up(queue, None)
        return await self._timed_rows(statement, None), {}

    async def _lease(
        self, queue: str, lease: bytes, rows: list[wire.Row], sources: Mapping[str, Source] | None = None
    ) -> AsyncLease:
        source, number = (sources or {}).get(queue), LeaseNumbers.of(lease).queue
        if source is None:
            known = self._known.sources
            source = known.get(number)
            if source is None:
                source, _ = await self._look_up(queue, None)
                self._known.make_room()
                known[number] = source
        return AsyncLease(self, queue, UUID(bytes=lease), wire.events(rows, source))

    async def _look_up(self, queue: str, conn: AsyncConnectionLike | None) -> tuple[Source, bool]:
        """The stream behind a queue, and whether receiving needs a timeout."""
        stream, salt, timed = (await self._rows(statements.stream_of(queue), conn))[0]
        return Source(stream, salt), timed

    async def ack(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Settle a lease's events as done: all, or those named. Returns how many; a repeated ack 0."""
        return await self._settle(lease, conn, "ack", seqs=seqs)

    async def retry(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        after: Duration | None = None,
        error: str | None = None,
        together: bool | None = None,
        detail: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Send events of a lease to be tried again `after` that time, by default the queue's backoff.

        Past the queue's max_attempts they become dead letters. With `together` these events, and no others,
        come together again: the same set. `detail`, such as a traceback, is kept with the error. Returns how
        many.
        """
        return await self._settle(
            lease, conn, "retry", seqs=seqs, after=after, error=error, together=together, detail=detail
        )

    async def bury(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        error: str | None = None,
        detail: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Send events of a lease to the queue's dead letters. Returns how many."""
        return await self._settle(lease, conn, "bury", seqs=seqs, error=error, detail=detail)

    async def release(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        after: Duration | None = None,
        error: str | None = None,
        bury_after: Duration | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Give events of a lease back untried: the attempt does not count. Returns how many.

        They are due at once, or `after` that time. `error` says why, while they wait. Pass `bury_after` for
        events that this consumer cannot handle and another may: each release makes them wait longer, up to a
        minute, and once the first one is `bury_after` ago they become dead letters.
        """
        return await self._settle(
            lease, conn, "release", seqs=seqs, after=after, error=error, bury_after=bury_after
        )

    async def _settle(
        self,
        lease: AsyncLease | UUID,
        conn: AsyncConnectionLike | None,
        function: LiteralString,
        **arguments: Any,
    ) -> int:
        """Call a settling function. A lease without events settles nothing."""
        with self.observer.settling(function, _queue_of(lease)) as observed:
            given = _lease_id(lease)
            if given is not None:
                observed.count = int(await self._value(call(function, lease=given, **arguments), conn))
                if function in _GIVING_BACK:
                    queue = LeaseNumbers.of(given.bytes).queue
                    # A copy: other threads add queues.
                    for claiming in list(self._known.claiming.values()):
                        claiming.gave_back(queue)
        return observed.count

    async def bury_unreadable(
        self, queue: str, error: str, attempts: int, *, conn: AsyncConnectionLike | None = None
    ) -> int | None:
        """Make the next event of a queue a dead letter because the server could not read it `attempts` times.

        For consumers whose `receive(queue, max=1)` keeps failing: the event is too large for a message, or
        damaged. Returns its number; None if the queue's `max_attempts` is not reached.
        """
        statement = call("bury_unreadable", queue=queue, error=error, attempts=attempts)
        number: int | None = await self._value(statement, conn)
        return number

    async def extend(
        self,
        lease: AsyncLease | UUID,
        lease_for: Duration | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> datetime:
        """Prolong a lease to `lease_for` from now (default: the queue's own). Returns when it expires."""
        given = lease.id if isinstance(lease, AsyncLease) else lease
        return moment(await self._value(call("extend", lease=given, lease_for=lease_for), conn))

    async def dead_letters(
        self,
        queue: str,
        topic: str | None = None,
        error: str | None = None,
        after: int = 0,
        max: int = 100,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> list[DeadLetter]:
        """Dead letters, oldest first: of a topic pattern, of errors like that, after the last one seen."""
        rows = await self._rows(statements.dead_letters(queue, topic, error, after, max), conn)
        return wire.dead_letters(rows, (await self._look_up(queue, conn))[0]) if rows else []

    async def redrive(
        self,
        queue: str,
        ids: Iterable[int] | None = None,
        topic: str | None = None,
        error: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Send dead letters back to be tried again, as if for the first time. Returns how many."""
        statement = call("redrive", queue=queue, ids=ids, topic=topic, error=error)
        moved = int(await self._value(statement, conn))
        claiming = self._known.claiming.get(queue)
        if claiming is not None:
            claiming.look()
        return moved

    async def drop_dead(
        self, queue: str, ids: Iterable[int] | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> int:
        """Delete dead letters for good: those named, or all of the queue. Returns how many."""
        return int(await self._value(call("drop_dead", queue=queue, ids=ids), conn))


def _lease_id(lease: AsyncLease | UUID | None) -> UUID | None:
    """The lease's id; None for one that holds nothing, which there is no need to settle."""
    if isinstance(lease, AsyncLease):
        return lease.id if lease.events else None
    return lease


def _queue_of(lease: AsyncLease | UUID) -> str | None:
    return lease.queue if isinstance(lease, AsyncLease) else None
