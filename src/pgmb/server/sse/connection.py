"""One client: its queue of frames, within limits, and its HTTP connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable
from itertools import count
from typing import Any, Final, cast

from starlette.types import Message, Send

from pgmb.server.limits import Limits
from pgmb.server.sse.matching import Entry, Interest

_numbers = count()


class Reader:
    """The pending frames of one client. The tail adds frames without waiting; a task sends them."""

    __slots__ = (
        "_events",
        "_limits",
        "_pending",
        "_size",
        "_waiter",
        "client_id",
        "dropped",
        "ended",
        "heartbeat_seen",
        "interest",
        "named",
        "number",
        "quiet",
        "send_now",
        "sending",
        "suspended",
        "task",
    )

    def __init__(self, interest: Interest, named: bool, limits: Limits, client_id: Hashable = None) -> None:
        self.number = next(_numbers)
        self.client_id = client_id
        """The API key of the request, or the client's address."""
        self.interest = interest
        self.named = named
        self.ended = False
        self.dropped = False
        """Whether it was disconnected for being too slow, or for a revoked key."""
        self.quiet = True
        """Whether no event came since the last heartbeat."""
        self.heartbeat_seen = False
        """Whether there was a heartbeat since its last check of access."""
        self.sending = False
        """Whether a send is in progress."""
        self._limits = limits
        self._pending: list[bytes] = []
        self._events = 0
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self.send_now: Callable[[Message], SuspendedSend | None] | None = None
        """Sends without waking the task; returns the suspended send if the client is slow."""
        self.suspended: SuspendedSend | None = None
        self.task: asyncio.Task[None] | None = None
        """The task that sends, to be cancelled if the client stops reading."""

    @property
    def pending(self) -> int:
        return len(self._pending)

    def give(self, frames: bytes, events: int = 0) -> None:
        """Add frames with this many events. Call `wake` after the last of them."""
        self._pending.append(frames)
        self._events += events
        self._size += len(frames)

    def wake(self) -> None:
        """Wake the sending task, or drop a client that exceeds its limits."""
        if self._events > self._limits.pending_events or self._size > self._limits.pending_bytes:
            self.drop()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def offer(self, message: Message, events: int) -> None:
        """Send a part of the response directly if nothing is pending, or else queue it."""
        self.quiet = False
        waiter = self._waiter
        if waiter is None or self.send_now is None or self._pending or waiter.done():
            self.give(message["body"], events)
            self.wake()
            return
        self.suspended = self.send_now(message)
        if self.suspended is not None or self.ended:
            waiter.set_result(None)

    def take(self) -> bytes:
        """Remove and return all pending frames."""
        if not self._pending:
            return b""
        taken = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        self._events = self._size = 0
        return taken

    async def wait(self) -> None:
        """Wait for frames, a heartbeat or the end."""
        if self._pending or self.ended or self.heartbeat_seen:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def heartbeat(self, frame: bytes) -> None:
        """Queue a keep-alive frame, unless events were sent since the last heartbeat."""
        if self.quiet and not self._pending:
            self.give(frame)
        self.quiet = True
        self.heartbeat_seen = True
        self.wake()

    def end(self) -> None:
        """End the reader after its pending frames."""
        self.ended = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def drop(self) -> None:
        """Disconnect the client and discard its pending frames. It can reconnect and resume."""
        self.dropped = True
        self._pending.clear()
        self._events = self._size = 0
        self.end()
        if self.sending and self.task is not None:
            # The send is blocked by a client that does not read: only cancelling ends it.
            self.task.cancel()


_FRAMES_PER_SEND: Final = 256


class Connection:
    """The HTTP connection to one client."""

    def __init__(self, reader: Reader, send: Send, counts: Any) -> None:
        self.reader = reader
        self._send = send
        self._counts = counts

    async def send(self, body: bytes, *, more: bool = True) -> None:
        if not body and more:
            return
        self.reader.sending = True
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (OSError, RuntimeError):
            # The client has disconnected: uvloop raises where it writes.
            self.reader.end()
            return
        finally:
            self.reader.sending = False
        self._counts.sse_bytes += len(body)

    @property
    def send_now(self) -> Callable[[Message], SuspendedSend | None] | None:
        """A function that sends without switching tasks, if the server is uvicorn; None otherwise.

        uvicorn's send writes at once, and waits only for a client that reads too slowly.
        """
        owner = getattr(self._send, "__self__", None)
        return self._step if type(owner).__module__.startswith("uvicorn.protocols.") else None

    def _step(self, message: Message) -> SuspendedSend | None:
        coroutine = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            waiting_for = coroutine.send(None)
        except StopIteration:
            return None
        except (OSError, RuntimeError):
            self.reader.end()
            return None
        return SuspendedSend(coroutine, waiting_for)

    async def finish(self, rest: SuspendedSend) -> None:
        """Wait for a suspended send."""
        self.reader.suspended = None
        self.reader.sending = True
        try:
            await rest
        except (OSError, RuntimeError):
            self.reader.end()
        finally:
            self.reader.sending = False

    async def send_all(self, entries: Iterable[Entry]) -> None:
        """Send missed events, as fast as the client reads."""
        frames = [entry.frame(self.reader.named) for entry in entries]
        for first in range(0, len(frames), _FRAMES_PER_SEND):
            part = frames[first : first + _FRAMES_PER_SEND]
            await self.send(b"".join(part))
            self._counts.sse_events += len(part)


class SuspendedSend:
    """A coroutine that was started without a task and had to wait. Awaiting it continues it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waiting_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waiting_for

    def __await__(self) -> Generator[Any, Any, None]:
        waiting_for = self._waits_for
        try:
            while True:
                try:
                    given = yield waiting_for
                except BaseException as error:
                    waiting_for = self._coroutine.throw(error)
                else:
                    waiting_for = self._coroutine.send(given)
        except StopIteration:
            return
