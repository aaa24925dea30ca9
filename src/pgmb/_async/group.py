"""A group: many subscriptions, read together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from pgmb._async.calls import AsyncCalls, Pool
from pgmb._async.consuming import AsyncConsuming
from pgmb._async.feed import AsyncFeed, AsyncFeeding
from pgmb._async.queues import AsyncQueues
from pgmb._async.receiving import NO_LEASE, AsyncLease
from pgmb._async.subscriptions import AsyncKeeper
from pgmb._core import groups, statements
from pgmb._core.groups import SubscriptionSpec
from pgmb._core.wire import Row
from pgmb.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueNotFound,
    TimeoutRequired,
)
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Duration, Source, Subscription


class AsyncGroup(AsyncCalls):
    """Subscriptions under one name, matched together: an event comes once, with the ids of all it matches.

    Made by `broker.group`, and closed with the broker. Every process that names the group shares its
    subscriptions, and what `receive` leases is leased to one of them.
    """

    def __init__(self, broker: AsyncGrouping, pool: Pool, name: str, stream: str) -> None:
        super().__init__(pool)
        self.name = name
        self.stream = stream
        self.closed = False
        self._broker = broker
        self._ready = False
        self._timed = False
        self._keeper = AsyncKeeper(pool, name)
        self._feeding: AsyncFeeding | None = None

    async def subscribe(
        self,
        patterns: Iterable[str] | None = None,
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        expires_after: Duration | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> UUID:
        """Subscribe to events that match all of this, and return the subscription's id.

        See `create_queue`. Equal subscriptions of a group are one. Where it expires, it does so after that
        long in which no process of the group that made it was there. What it matches comes from `receive`.
        """
        spec = SubscriptionSpec.of(patterns, equals, filter, condition, params)
        expires = None if expires_after is None else groups.seconds(expires_after)
        await self._make_ready(must=False)
        statement = spec.subscribe(self.name, expires_after, self.stream)
        id = UUID(bytes=await self._value(statement, conn))
        if expires is not None:
            self._keeper.keep(id, expires)
        return id

    async def unsubscribe(self, id: UUID, *, conn: AsyncConnectionLike | None = None) -> bool:
        """End a subscription, also for others that made an equal one. True if there was one."""
        ended = bool(await self._value(groups.unsubscribe(id), conn))
        if conn is None:
            self._keeper.forget(id)
        return ended

    async def subscriptions(self) -> list[Subscription]:
        """Those of the group, of all processes, the oldest first. For roles that may see them: admins."""
        rows = await self._rows(groups.subscriptions(self.name, self.stream), None)
        return [Subscription.of(row) for row in rows]

    async def resume(self, id: UUID | None = None) -> int:
        """Have subscriptions matched again that were paused because they raised: all or one. How many."""
        return int(await self._value(groups.resume_subscriptions(self.name, id), None))

    async def receive(
        self,
        max: int = 1000,
        lease_for: Duration | None = None,
        ack: AsyncLease | UUID | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> AsyncLease:
        """The next events that match a subscription of the group, leased: see `Broker.receive`.

        `event.subscriptions` are the ids of all that it matches. They come from a queue that has the group's
        name, which is created when the group is first used.
        """
        await self._make_ready(must=True)
        earlier = (ack.id if ack.events else None) if isinstance(ack, AsyncLease) else ack
        statement = groups.receive_group(self.name, max, lease_for, earlier, alone=conn is None)
        rows = await self._received(statement, conn)
        if not rows:
            return AsyncLease(self._broker, self.name, NO_LEASE, [])
        lease = UUID(bytes=rows[0][-1])
        return AsyncLease(self._broker, self.name, lease, groups.events(rows, Source(self.stream, 0)))

    def listen(
        self,
        patterns: Iterable[str] | None = None,
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        expires_after: Duration = 60.0,
        max: int = 1000,
        max_pending: int = 10_000,
        max_wait: Duration | None = None,
    ) -> AsyncFeed:
        """Events that match, as they are committed, in batches of at most `max`: an iterator of lists.

        Fire and forget: nothing is settled, and events published while no feed listens are lost. One tail
        reads for all feeds of this group. Of more than `max_pending` events that wait in a feed the oldest
        are dropped. It ends after `max_wait` in which nothing came. If the process dies, its subscription
        expires `expires_after` later.
        """
        if max < 1:
            raise InvalidArgument(f"max must be at least 1, got {max}")
        if self._feeding is None:
            self._feeding = AsyncFeeding(self._pool, self._broker.listener(), self.name, self.stream)
        waited = statements.interval(max_wait)
        return AsyncFeed(
            self._feeding,
            SubscriptionSpec.of(patterns, equals, filter, condition, params),
            groups.seconds(expires_after),
            max,
            max_pending,
            None if waited is None else waited.total_seconds(),
        )

    async def close(self) -> None:
        """End its feeds, and keep its subscriptions no more: those that expire will. May be called again."""
        self.closed = True
        await self._keeper.close()
        if self._feeding is not None:
            await self._feeding.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _received(self, statement: statements.Statement, conn: AsyncConnectionLike | None) -> list[Row]:
        # In the caller's transaction it must not come to an error.
        if not self._timed and conn is None:
            try:
                return await self._rows(statement, None)
            except TimeoutRequired:
                self._timed = True
        return await self._timed_rows(statement, conn)

    async def _make_ready(self, *, must: bool) -> None:
        """See that the group's queue is there. Not in the caller's transaction: others need it too."""
        if self._ready:
            return
        try:
            stream = await self._broker.stream_of(self.name)
        except QueueNotFound:
            await self._create(must=must)
            return
        except PermissionDenied as error:
            if not must:
                return
            error.advise(f"As an admin: select pgmb.grant_consume('{self.name}', 'this role');")
            raise
        if stream != self.stream:
            conflict = Conflict(f"queue {self.name!r} reads stream {stream!r}, not {self.stream!r}")
            conflict.advise("Name the group's stream: group(name, stream=...), or take another name.")
            raise conflict
        self._ready = True

    async def _create(self, *, must: bool) -> None:
        try:
            await self._broker.create_queue(self.name, stream=self.stream)
        except PermissionDenied as error:
            if not must:
                return
            missing = NotFound(f"queue {self.name!r} does not exist, and this role may not create it")
            missing.advise(
                f"As an admin: select pgmb.create_queue('{self.name}', stream => '{self.stream}');"
                " or grant the role pgmb_admin."
            )
            raise missing from error
        self._ready = True


class AsyncGrouping(AsyncConsuming, AsyncQueues):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._groups: dict[tuple[str, str], AsyncGroup] = {}

    def group(self, name: str, *, stream: str = "main") -> AsyncGroup:
        """A group of subscriptions, by its name: the same object each time, until it is closed."""
        found = self._groups.get((name, stream))
        if found is None or found.closed:
            found = self._groups[name, stream] = AsyncGroup(self, self._pool, name, stream)
        return found
