"""Queues: create, change, drop, and where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pgmb._async.calls import AsyncCalls
from pgmb._core.statements import call
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Duration, Position, WhenFull


class AsyncQueues(AsyncCalls):
    async def create_queue(
        self,
        name: str,
        patterns: Iterable[str] = ("#",),
        *,
        stream: str = "main",
        starting: Position | None = None,
        lease_for: Duration | None = None,
        max_attempts: int | None = None,
        backoff_base: Duration | None = None,
        backoff_factor: float | None = None,
        backoff_max: Duration | None = None,
        backoff_jitter: float | None = None,
        ordered: bool | None = None,
        max_in_flight: int | None = None,
        rps: float | None = None,
        ttl: Duration | None = None,
        max_length: int | None = None,
        when_full: WhenFull | None = None,
        lanes: Iterable[str] | None = None,
        shards: int | None = None,
        fair_by: str | None = None,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> bool:
        """Create a queue that reads `stream` from `starting` on, by default from now.

        `ordered`: events of one key come one after another, keys in parallel, dealt out to `shards`.
        `max_in_flight`, `rps`: limits that hold across processes. `ttl`: older events become dead letters.
        `max_length`: how many may wait; then publishers are refused, or the oldest are dropped. `lanes`:
        patterns of what is urgent, most urgent first. `fair_by`: "key" or "header:NAME" names an event's
        tenant, and tenants are served in turn. `equals`: fields and their values, as in
        `{"payload": {"status": "paid"}}`; `filter`: a jsonpath predicate over topic, key, payload and
        headers, such as `$.payload.total > $least`, with `params`; `condition`: an SQL expression, for roles
        that may. True if it was created, False if it exists with the same stream, patterns, filter, order,
        lanes and fair_by; Conflict if it differs.
        """
        return bool(
            await self._value(
                call(
                    "create_queue",
                    name=name,
                    patterns=_several(patterns),
                    stream=stream,
                    starting=starting,
                    lease_for=lease_for,
                    max_attempts=max_attempts,
                    backoff_base=backoff_base,
                    backoff_factor=backoff_factor,
                    backoff_max=backoff_max,
                    backoff_jitter=backoff_jitter,
                    ordered=ordered,
                    max_in_flight=max_in_flight,
                    rps=rps,
                    ttl=ttl,
                    max_length=max_length,
                    when_full=when_full,
                    lanes=None if lanes is None else _several(lanes),
                    shards=shards,
                    fair_by=fair_by,
                    equals=equals,
                    filter=filter,
                    condition=condition,
                    params=params,
                ),
                conn,
            )
        )

    async def convert_queue(
        self,
        queue: str,
        *,
        ordered: bool = False,
        shards: int | None = None,
        lanes: Iterable[str] | None = None,
        fair_by: str | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Make a queue ordered, prioritised or fair (see `create_queue`), or plain where nothing is given.

        It keeps its events, retries and dead letters, and no settled event comes again. Raises QueueHeld
        while leases are held: `pause` the queue, and try again until its consumers have settled them.
        """
        given = call(
            "convert_queue", queue=queue, ordered=ordered, shards=shards, lanes=lanes, fair_by=fair_by
        )
        await self._value(given, conn)

    async def alter_queue(
        self,
        queue: str,
        *,
        lease_for: Duration | None = None,
        max_attempts: int | None = None,
        backoff_base: Duration | None = None,
        backoff_factor: float | None = None,
        backoff_max: Duration | None = None,
        backoff_jitter: float | None = None,
        max_in_flight: int | None = None,
        rps: float | None = None,
        ttl: Duration | None = None,
        max_length: int | None = None,
        when_full: WhenFull | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Change a queue's lease, retry policy and limits. None leaves a setting, 0 takes a limit away."""
        await self._value(
            call(
                "alter_queue",
                queue=queue,
                lease_for=lease_for,
                max_attempts=max_attempts,
                backoff_base=backoff_base,
                backoff_factor=backoff_factor,
                backoff_max=backoff_max,
                backoff_jitter=backoff_jitter,
                max_in_flight=max_in_flight,
                rps=rps,
                ttl=ttl,
                max_length=max_length,
                when_full=when_full,
            ),
            conn,
        )

    async def bind(
        self,
        queue: str,
        patterns: Iterable[str],
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        no_filter: bool = False,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Replace a queue's patterns, from its position on: leases in flight keep what they hold.

        A filter that is given replaces the queue's. Without one the queue keeps its filter; `no_filter`
        removes it. See `create_queue`.
        """
        await self._value(
            call(
                "bind",
                queue=queue,
                patterns=_several(patterns),
                equals=equals,
                filter=filter,
                condition=condition,
                params=params,
                no_filter=no_filter,
            ),
            conn,
        )

    async def hand_over(
        self, queue: str, app: str | None, *, conn: AsyncConnectionLike | None = None
    ) -> None:
        """Hand a queue over to the app of this name: apps of other names are refused it when they start.

        None: it belongs to the next named app that declares it. Stop the workers of the former app first.
        """
        await self._value(call("hand_over", queue=queue, app=app), conn)

    async def drop_queue(self, queue: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Drop a queue with its leases, retries and dead letters. True if there was one."""
        return bool(await self._value(call("drop_queue", queue=queue), conn))

    async def pause(
        self, queue: str, reason: str | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> None:
        """Stop delivery: `receive` returns nothing until `resume`. Leases in flight can still be settled."""
        await self._value(call("pause", queue=queue, reason=reason), conn)

    async def resume(self, queue: str, *, conn: AsyncConnectionLike | None = None) -> None:
        """Resume delivery."""
        await self._value(call("resume", queue=queue), conn)

    async def seek(self, queue: str, to: Position, *, conn: AsyncConnectionLike | None = None) -> None:
        """Move a queue to a position. Leases in flight end and retries are dropped; dead letters stay."""
        await self._value(call("seek", queue=queue, to=to), conn)

    async def purge(self, queue: str, *, conn: AsyncConnectionLike | None = None) -> None:
        """Skip everything waiting in a queue: fresh events, retries and leases. Dead letters stay."""
        await self._value(call("purge", queue=queue), conn)


def _several(patterns: Iterable[str]) -> list[str]:
    # A lone string is an iterable of its letters, which is never meant.
    return [patterns] if isinstance(patterns, str) else list(patterns)
