"""A delivery: an event in a handler's hands."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload
from uuid import UUID

import msgspec
from msgspec.structs import force_setattr

from pgmb._sync.receiving import Receiving
from pgmb.app.outcome import waiting
from pgmb.app.payload import Decode
from pgmb.app.progress import Failure, LeaseProgress
from pgmb.outbox import AsyncConnectionLike, ConnectionLike, is_asynchronous
from pgmb.types import Duration, Event

if TYPE_CHECKING:
    from pgmb._sync.calls import Pool

T_co = TypeVar("T_co", covariant=True)

# Settles inside a caller's transaction only, so that it needs no connections of its own.
_synchronous = Receiving(cast("Pool", None))


class Delivery(msgspec.Struct, Generic[T_co], frozen=True, eq=False):
    """An event as a handler gets it that asks for more than the payload: `event: pgmb.Delivery[Order]`."""

    _decode: Decode
    event: Event
    progress: LeaseProgress
    _payload: Any = msgspec.UNSET

    @property
    def payload(self) -> T_co:
        """The payload. Of a delivery without a type, it is decoded at the first access."""
        if self._payload is msgspec.UNSET:
            force_setattr(self, "_payload", self._decode(self.event.raw))
        return cast("T_co", self._payload)

    @property
    def topic(self) -> str:
        return self.event.topic

    @property
    def key(self) -> str | None:
        return self.event.key

    @property
    def headers(self) -> dict[str, Any]:
        return self.event.headers

    @property
    def id(self) -> UUID:
        return self.event.id

    @property
    def seq(self) -> int:
        return self.event.seq

    @property
    def attempt(self) -> int:
        """1 at the first delivery."""
        return self.event.attempt

    @property
    def published_at(self) -> datetime:
        return self.event.published_at

    @property
    def stream(self) -> str:
        return self.event.stream

    @property
    def queue(self) -> str:
        return self.progress.lease.queue

    @property
    def raw(self) -> bytes:
        """The payload as JSON text, unchanged."""
        return self.event.raw

    @overload
    def ack(self, *, conn: AsyncConnectionLike) -> Awaitable[int]: ...

    @overload
    def ack(self, *, conn: ConnectionLike) -> int: ...

    def ack(self, *, conn: Any) -> Any:
        """Settle this event inside your transaction: it and your writes are committed together, or neither.

        To be awaited if the connection is asynchronous. The worker does not settle the event then; if the
        transaction is rolled back it is delivered again, at the latest when the lease has expired. Raises
        LeaseLost if it was delivered to another meanwhile: roll back.
        """
        self.progress.taken.add(self.event.seq)
        if is_asynchronous(conn):
            return self.progress.lease.ack(self.event, conn=conn)
        return _synchronous.ack(self.progress.lease.id, [self.event.seq], conn=conn)

    def retry(self, after: Duration | None = None, reason: str | None = None) -> None:
        """Have this event tried again once the handler returns: for single events of a batch."""
        self._fail(False, None if after is None else waiting(after), reason or "Retry")

    def reject(self, reason: str = "rejected") -> None:
        """Have this event made a dead letter once the handler returns: for single events of a batch."""
        self._fail(True, None, reason)

    def _fail(self, final: bool, after: float | None, error: str) -> None:
        self.progress.failed[self.event.seq] = Failure(final, after, error)

    async def extend(self, lease_for: Duration | None = None) -> datetime:
        """Prolong the lease. A worker does that by itself while a handler runs."""
        return await self.progress.lease.extend(lease_for)

    def __repr__(self) -> str:
        return f"Delivery({self.event!r})"
