"""Streams: create, change, drop, rotate."""

from __future__ import annotations

from pgmb._async.calls import AsyncCalls
from pgmb._core.statements import call
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Duration


class AsyncStreams(AsyncCalls):
    async def create_stream(
        self,
        name: str,
        *,
        rotate_every: Duration | None = None,
        rotate_events: int | None = None,
        keep_for: Duration | None = None,
        drop_unread: bool = False,
        archive: bool = False,
        max_event_bytes: int | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Create a stream; nothing happens when it exists.

        By default its segments rotate every hour or 50 million events, and are dropped after 7 days, once
        every queue and durable reader has passed them. A negative `keep_for` keeps them without limit.
        `max_event_bytes` bounds an event's payload and headers together, as text; by default 64 MiB.
        """
        await self._value(
            call(
                "create_stream",
                name=name,
                rotate_every=rotate_every,
                rotate_events=rotate_events,
                keep_for=keep_for,
                drop_unread=drop_unread,
                archive=archive,
                max_event_bytes=max_event_bytes,
            ),
            conn,
        )

    async def alter_stream(
        self,
        name: str,
        *,
        rotate_every: Duration | None = None,
        rotate_events: int | None = None,
        keep_for: Duration | None = None,
        drop_unread: bool | None = None,
        archive: bool | None = None,
        max_event_bytes: int | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Change settings of a stream. None keeps one, a negative value disables it."""
        await self._value(
            call(
                "alter_stream",
                name=name,
                rotate_every=rotate_every,
                rotate_events=rotate_events,
                keep_for=keep_for,
                drop_unread=drop_unread,
                archive=archive,
                max_event_bytes=max_event_bytes,
            ),
            conn,
        )

    async def drop_stream(self, name: str, *, conn: AsyncConnectionLike | None = None) -> None:
        """Drop a stream with all its events. Conflict while queues read it."""
        await self._value(call("drop_stream", name=name), conn)

    async def rotate(self, stream: str = "main", *, conn: AsyncConnectionLike | None = None) -> int | None:
        """Open the next segment and return its number; None if open publishers cannot see it yet."""
        number: int | None = await self._value(call("rotate", stream=stream), conn)
        return number

    async def maintain(self, *, conn: AsyncConnectionLike | None = None) -> bool:
        """All maintenance in one call: rotation, sealing, retention, clearing. What a Janitor calls.

        Returns:
            Whether more is left to do: a call does a bounded amount of work.
        """
        return bool(await self._value(call("maintain"), conn))
