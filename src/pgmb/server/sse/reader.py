"""A client: what waits for it, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from itertools import count

from starlette.types import Message

from pgmb.server.limits import Limits
from pgmb.server.sse.interest import Interest
from pgmb.server.sse.stepping import Rest

_numbers = count()


class Reader:
    """Given frames by the tail, which never waits; emptied by whoever sends them on."""

    __slots__ = (
        "_events",
        "_limits",
        "_pending",
        "_size",
        "_waiter",
        "asleep",
        "beaten",
        "dropped",
        "ended",
        "held_up",
        "interest",
        "named",
        "number",
        "sending",
        "straight",
        "task",
        "who",
    )

    def __init__(self, interest: Interest, named: bool, limits: Limits, who: Hashable = None) -> None:
        self.number = next(_numbers)
        self.who = who
        """The key that it came with, or its address."""
        self.interest = interest
        self.named = named
        self.ended = False
        self.dropped = False
        """Whether it was too slow."""
        self.asleep = True
        """Whether nothing came for it since the last beat."""
        self.beaten = False
        """Whether there was a beat since it last looked."""
        self.sending = False
        """Whether what was taken is on its way to the client."""
        self._limits = limits
        self._pending: list[bytes] = []
        self._events = 0
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.straight: Callable[[Message], Rest | None] | None = None
        """Sends at once, while whoever sends for it sleeps; what is left of it if that takes long."""
        self.held_up: Rest | None = None
        self.task: asyncio.Task[None] | None = None
        """Whose sending a client that takes nothing holds up."""

    @property
    def pending(self) -> int:
        return len(self._pending)

    def give(self, frames: bytes, events: int = 0) -> None:
        """More to send, so many events. It is told by `wake`, after all that there is at once."""
        self._pending.append(frames)
        self._events += events
        self._size += len(frames)

    def wake(self) -> None:
        """There is something to take, or too much for somebody so slow."""
        if self._events > self._limits.pending_events or self._size > self._limits.pending_bytes:
            self.drop()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def offer(self, message: Message, events: int) -> None:
        """Some events, as a part of the answer: sent at once if nothing is in the way, or given."""
        self.asleep = False
        waiter = self._waiter
        if waiter is None or self.straight is None or self._pending or waiter.done():
            self.give(message["body"], events)
            self.wake()
            return
        self.held_up = self.straight(message)
        if self.held_up is not None or self.ended:
            waiter.set_result(None)

    def take(self) -> bytes:
        """All that waits."""
        if not self._pending:
            return b""
        taken = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        self._events = self._size = 0
        return taken

    async def wait(self) -> None:
        """Until there is something to take, or it ended."""
        if self._pending or self.ended or self.beaten:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def beat(self, frame: bytes) -> None:
        """Now and then: says that the connection is alive, if nothing else did."""
        if self.asleep and not self._pending:
            self.give(frame)
        self.asleep = True
        self.beaten = True
        self.wake()

    def end(self) -> None:
        """Nothing more comes; what waits is still sent."""
        self.ended = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def drop(self) -> None:
        """Let go of what waits, and of the client, which comes back for it when it can."""
        self.dropped = True
        self._pending.clear()
        self._events = self._size = 0
        self.end()
        if self.sending and self.task is not None:
            # The client does not take what was sent: nothing else would end that.
            self.task.cancel()
