"""One client: its queue of frames, within limits, and its HTTP connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, cast

from starlette.types import Message, Send

from pgmb.server.limits import Limits
from pgmb.server.sse.matching import PIECE_BYTES, Entry, Interest, parts

_FRAMES_PER_SEND: Final = 256
STALLED_SECONDS: Final = 30.0
"""A client that takes nothing for so long is disconnected."""


@dataclass(slots=True, eq=False)
class Reader:
    """The pending frames of one client. The tail adds frames without waiting; a task sends them."""

    interest: Interest
    named: bool
    limits: Limits
    client_id: Hashable = None
    """The API key of the request, or the client's address."""
    number: int = field(default_factory=count().__next__)
    ended: bool = False
    dropped: bool = False
    """Whether it was disconnected: it was too slow, its key was revoked, or its filter ended."""
    quiet: bool = True
    """Whether no event came since the last heartbeat."""
    heartbeat_seen: bool = False
    """Whether there was a heartbeat since its last check of access."""
    sending: bool = False
    """Whether a send is in progress."""
    send_now: Callable[[Message], bool] | None = None
    """Sends without waking the task, if the server is uvicorn; False if the client does not keep up."""
    abort: Callable[[], None] | None = None
    """Closes the connection and discards what the server has buffered for it."""
    task: asyncio.Task[None] | None = None
    """The task that sends, to be cancelled if the client stops reading."""
    _pending: deque[tuple[bytes, int]] = field(default_factory=deque[tuple[bytes, int]])
    _events: int = 0
    _size: int = 0
    _waiter: asyncio.Future[None] | None = None

    @property
    def pending(self) -> int:
        return len(self._pending)

    def give(self, frames: bytes, events: int = 0) -> None:
        """Add frames with this many events. Call `wake` after the last of them."""
        self._pending.append((frames, events))
        self._events += events
        self._size += len(frames)

    def wake(self) -> None:
        """Wake the sending task, or drop a client that exceeds its limits. One message may be of any size."""
        too_large = self._size > self.limits.pending_bytes and len(self._pending) > 1
        if too_large or self._events > self.limits.pending_events:
            self.drop()
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def offer(self, message: Message, events: int) -> None:
        """Send a part of the response directly if nothing is pending, or else queue it."""
        self.quiet = False
        waiter, send_now = self._waiter, self.send_now
        idle = waiter is not None and not waiter.done() and not self._pending
        if not idle or send_now is None or not send_now(message):
            self.give(message["body"], events)
            self.wake()

    def take(self) -> bytes:
        """Remove and return the next pending frames: small ones together, a large one by itself."""
        taken: list[bytes] = []
        size = 0
        while self._pending and (not taken or size + len(self._pending[0][0]) <= PIECE_BYTES):
            frames, events = self._pending.popleft()
            taken.append(frames)
            size += len(frames)
            self._events -= events
        self._size -= size
        return b"".join(taken)

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
        if self.abort is not None:
            self.abort()


class Connection:
    """The HTTP connection to one client."""

    def __init__(self, reader: Reader, send: Send, counts: Any) -> None:
        self.reader = reader
        self._send = send
        self._counts = counts
        # The server's side of the request, if the server is uvicorn.
        cycle = getattr(send, "__self__", None)
        self._flow: Any = None
        if type(cycle).__module__.startswith("uvicorn.protocols."):
            self._flow = cast("Any", cycle).flow
            reader.abort = cast("Any", cycle).transport.abort
            reader.send_now = self._send_now

    async def send(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the response, in pieces. Drops a client that takes none of them."""
        self.reader.sending = True
        try:
            for first in range(0, len(body), PIECE_BYTES):
                piece = body if len(body) <= PIECE_BYTES else body[first : first + PIECE_BYTES]
                async with asyncio.timeout(STALLED_SECONDS):
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                self._counts.sse_bytes += len(piece)
            if not more:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self.reader.sending = False
            self.reader.drop()
        except (OSError, RuntimeError):
            # The client has disconnected: uvloop raises where it writes.
            self.reader.end()
        finally:
            self.reader.sending = False

    async def send_pending(self) -> None:
        while self.reader.pending:
            await self.send(self.reader.take())

    def _send_now(self, message: Message) -> bool:
        # uvicorn's send writes at once, and waits only if the client reads too slowly.
        if self._flow.write_paused or len(message["body"]) > PIECE_BYTES:
            return False
        try:
            cast("Coroutine[Any, Any, None]", self._send(message)).send(None)
        except StopIteration:
            self._counts.sse_bytes += len(message["body"])
        except (OSError, RuntimeError):
            self.reader.end()
        return True

    async def send_all(self, entries: Sequence[Entry]) -> None:
        """Send missed events, as fast as the client reads."""
        for part in parts(entries, _FRAMES_PER_SEND):
            if self.reader.ended:
                return
            await self.send(b"".join([entry.frame(self.reader.named) for entry in part]))
            self._counts.sse_events += len(part)
            # A client that keeps up never makes the server wait, and other tasks shall run.
            await asyncio.sleep(0)
