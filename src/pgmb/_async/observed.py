"""A broker with an observer. One without is another class, and pays nothing for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from uuid import UUID

from psycopg.conninfo import conninfo_to_dict

from pgmb._async.broker import AsyncBroker
from pgmb._async.lease import AsyncLease
from pgmb._async.publisher import AsyncPublisher
from pgmb.observer import Observer
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Duration


class AsyncObservedPublisher(AsyncPublisher):
    _observer: Observer

    async def enqueue(
        self, topic: str, payload: Any, *, headers: Any = None, stream: str = "main", **options: Any
    ) -> UUID:
        with self._observer.enqueueing(topic, headers, stream) as one:
            one.id = await super().enqueue(topic, payload, headers=one.headers, stream=stream, **options)
        return one.id

    def observe(self, observer: Observer) -> None:
        self._observer = observer


class AsyncObserved(AsyncBroker):
    """Calls of its observer around those of the broker."""

    _observer: Observer

    async def publish(
        self, topic: str, payload: Any, *, headers: Any = None, stream: str = "main", **options: Any
    ) -> UUID:
        with self._observer.publishing(topic, headers, stream) as one:
            one.id = await super().publish(topic, payload, headers=one.headers, stream=stream, **options)
        return one.id

    async def publish_many(
        self, topic: Any, payloads: Any = None, *, headers: Any = None, stream: str = "main", **options: Any
    ) -> int:
        with self._observer.publishing_many(topic, payloads, headers, stream) as many:
            changed: Any = many.topic
            many.count = await super().publish_many(
                changed, payloads, headers=many.headers, stream=stream, **options
            )
        return many.count

    def publisher(self, *arguments: Any, **options: Any) -> AsyncPublisher:
        made = super().publisher(*arguments, **options)
        made.__class__ = AsyncObservedPublisher
        cast("AsyncObservedPublisher", made).observe(self._observer)
        return made

    async def receive(
        self,
        queue: str,
        max: int = 100,
        lease_for: Duration | None = None,
        ack: AsyncLease | UUID | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> AsyncLease:
        with self._observer.receiving(queue) as received:
            lease = await super().receive(queue, max, lease_for, ack, conn=conn)
            received.events = lease.events
        return lease

    async def receive_any(
        self,
        queues: Iterable[str],
        max: int = 100,
        lease_for: Duration | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> AsyncLease:
        with self._observer.receiving(None) as received:
            lease = await super().receive_any(queues, max, lease_for, conn=conn)
            received.queue, received.events = lease.queue or None, lease.events
        return lease

    async def ack(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        with self._observer.settling("ack", _queue(lease)) as settled:
            settled.count = await super().ack(lease, seqs, conn=conn)
        return settled.count

    async def retry(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        after: Duration | None = None,
        error: str | None = None,
        together: bool | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        with self._observer.settling("retry", _queue(lease)) as settled:
            settled.count = await super().retry(lease, seqs, after, error, together, conn=conn)
        return settled.count

    async def bury(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        error: str | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        with self._observer.settling("bury", _queue(lease)) as settled:
            settled.count = await super().bury(lease, seqs, error, conn=conn)
        return settled.count

    async def release(
        self,
        lease: AsyncLease | UUID,
        seqs: Iterable[int] | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        with self._observer.settling("release", _queue(lease)) as settled:
            settled.count = await super().release(lease, seqs, conn=conn)
        return settled.count

    def observe(self, observer: Observer) -> None:
        self._observer = observer

    @property
    def server(self) -> tuple[str | None, int | None]:
        """Host and port, as far as the connection string names them."""
        text = self._pool.conninfo if isinstance(self._pool.conninfo, str) else ""
        given: dict[str, Any] = {**conninfo_to_dict(text), **cast("dict[str, Any]", self._pool.kwargs)}
        host, port = given.get("host") or given.get("hostaddr"), str(given.get("port") or "")
        return (str(host) if host else None), (int(port) if port.isdigit() else None)


def observed(broker: AsyncBroker) -> AsyncObserved:
    """The same broker, made one that has an observer."""
    if isinstance(broker, AsyncObserved):
        return broker
    kind = type(broker)
    broker.__class__ = type(f"Observed{kind.__name__}", (AsyncObserved, kind), {})
    return cast("AsyncObserved", broker)


def _queue(lease: AsyncLease | UUID) -> str | None:
    return lease.queue if isinstance(lease, AsyncLease) else None
