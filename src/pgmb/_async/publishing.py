"""Publishing: one event, many, later; and taking back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, overload
from uuid import UUID

from pgmb._async.calls import AsyncCalls, writing_log
from pgmb._core import batch, statements, wire
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Duration, NewEvent, derive_id


class AsyncPublishing(AsyncCalls):
    async def publish(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Any = None,
        stream: str = "main",
        id: UUID | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        dedup_key: str | None = None,
        dedup_for: Duration = batch.ONE_DAY,
        conn: AsyncConnectionLike | None = None,
    ) -> UUID:
        """Publish an event and return its id. It is delivered when the transaction commits.

        The payload is whatever msgspec encodes as JSON; a `msgspec.Raw` goes as it is. With `delay`, or `at`,
        the event enters the log then. If the stream had an event under the same `dedup_key` within
        `dedup_for`, nothing is published, and its id returned.
        """
        with self.observer.publishing(topic, headers, stream) as observed:
            if id is None and delay is None and at is None and dedup_key is None:
                published = await self._insert(topic, payload, key, observed.headers, stream, conn)
            else:
                statement = statements.publish(
                    topic, payload, key, observed.headers, stream, id, delay, at, dedup_key, dedup_for
                )
                published = wire.uuid(await self._value(statement, conn))
            observed.id = published
        return published

    async def _insert(
        self,
        topic: str,
        payload: Any,
        key: str | None,
        headers: Any,
        stream: str,
        conn: AsyncConnectionLike | None,
    ) -> UUID:
        insert = statements.insert if conn is None else statements.insert_elsewhere
        with writing_log(stream):
            ((seq, at, told),) = await self._rows(insert(topic, payload, key, headers, stream), conn)
        if conn is not None:
            return derive_id(seq, at, told)
        salt = self._known.salts.get(told)
        if salt is None:
            salt = int(await self._value(statements.salt_of(stream), None))
            self._known.make_room()
            self._known.salts[told] = salt
        return derive_id(seq, at, salt)

    @overload
    async def publish_many(
        self,
        topic: str,
        payloads: Iterable[Any],
        *,
        headers: Any = None,
        stream: str = "main",
        conn: AsyncConnectionLike | None = None,
    ) -> int: ...

    @overload
    async def publish_many(
        self,
        events: Iterable[NewEvent],
        /,
        *,
        stream: str = "main",
        dedup_for: Duration = batch.ONE_DAY,
        conn: AsyncConnectionLike | None = None,
    ) -> int: ...

    async def publish_many(
        self,
        topic: str | Iterable[NewEvent],
        payloads: Iterable[Any] | None = None,
        *,
        headers: Any = None,
        stream: str = "main",
        dedup_for: Duration = batch.ONE_DAY,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Publish payloads of one topic, or events with all of their own, and return how many.

        All or none, in their order. Any number: more than 2,000, or than 32 MiB, are copied, in blocks of as
        many, as the iterable gives them. Events whose `dedup_key` is taken, as `publish` has it, are left out
        and not counted.
        """
        with self.observer.publishing_many(topic, payloads, headers, stream) as observed:
            plan = batch.plan(observed.topic, payloads, observed.headers, stream, dedup_for)
            if isinstance(plan, batch.Copy):
                count = await self._copy(plan, conn)
            elif isinstance(plan, batch.Parts):
                count = await self._parts(plan, conn)
            else:
                count = int(await self._value(plan, conn))
            observed.count = count
        return count

    async def cancel(self, id: UUID, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Take back an event that was published with a delay and is not yet due. True if it was there."""
        return bool(await self._value(statements.call("cancel", id=id), conn))
