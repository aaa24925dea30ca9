"""A lease: the events that a consumer holds while it works on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

from pgmb.outbox import AsyncConnectionLike
from pgmb.statements import seqs_of
from pgmb.types import Duration, Event

if TYPE_CHECKING:
    from pgmb._async.receiving import AsyncReceiving

NO_LEASE = UUID(int=0)


class AsyncLease:
    """Events of a queue, held until they are settled or the lease expires. Without events it is false.

    `ack`, `retry` and `bury` take one event, several, or none for all that are left. All of them raise
    LeaseLost when the lease expired and was taken over.
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
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Try again later, by default after the queue's backoff; `together` as the same set. How many."""
        return await self._broker.retry(self, seqs_of(events), after, error, together, conn=conn)

    async def bury(
        self,
        events: Event | Iterable[Event | int] | None = None,
        error: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Give up: to the queue's dead letters. Returns how many."""
        return await self._broker.bury(self, seqs_of(events), error, conn=conn)

    async def release(
        self,
        events: Event | Iterable[Event | int] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Give back untried: due at once, the attempt not counted. Returns how many."""
        return await self._broker.release(self, seqs_of(events), conn=conn)

    async def extend(
        self, lease_for: Duration | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> datetime:
        """Prolong it, from now. Returns when it expires."""
        return await self._broker.extend(self, lease_for, conn=conn)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, {len(self.events)} events>"
