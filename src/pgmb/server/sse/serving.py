"""Server-sent events to one client: what it asks for, and its connection until either end leaves."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias, cast

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from pgmb.errors import PgmbError
from pgmb.server.context import WAY_OUT, Context
from pgmb.server.problems import problem_of
from pgmb.server.sse import frame
from pgmb.server.sse.hub import Hub, Source
from pgmb.server.sse.interest import Interest
from pgmb.server.sse.mark import Mark
from pgmb.server.sse.reader import Reader
from pgmb.server.sse.recent import Entry
from pgmb.server.sse.replay import Gone
from pgmb.server.sse.stepping import Rest
from pgmb.server.sse.tail import Tail
from pgmb.server.watching import KEY_NAME

logger = logging.getLogger("pgmb.server")

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    # nginx, and what imitates it, would hold events back.
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_COME_BACK_AFTER: Final = (1000, 3000)
"""Milliseconds, at random between: not all at once when a process ends."""
_COME_BACK_MUCH_LATER: Final = (3000, 10_000)
_PASSING: Final = (429, 503)
"""What is otherwise in a while: the database restarts, this process ends, or is full."""
_AT_ONCE: Final = 256
EARLIEST: Final = "earliest"


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may see. `named`: events come under their topics instead of as messages."""

    stream: str = "main"
    topics: tuple[str, ...] = ()
    equals: Mapping[str, Any] | None = None
    filter: str | None = None
    params: Mapping[str, Any] | None = None
    named: bool = False

    def interest(self) -> Interest:
        """InvalidArgument if it is none."""
        return Interest.of(self.topics, self.equals, self.filter, self.params)


Check: TypeAlias = Callable[[Request], Awaitable[bool]]
Watch: TypeAlias = Callable[[Request, Callable[[], None]], AbstractContextManager[None]]
Ask: TypeAlias = Callable[[Request], Awaitable[Subscription | None]]


class Serving:
    """An ASGI endpoint. `ask` says what a request may see, or None for 204, after which browsers do not come
    back; `check` is asked now and then whether it still may; `watch` calls back once it may not.
    """

    def __init__(
        self, context: Context, hub: Hub, ask: Ask, check: Check | None = None, watch: Watch | None = None
    ) -> None:
        self._context = context
        self._hub = hub
        self._ask = ask
        self._check = check
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            subscription = await self._ask(request)
            if subscription is None:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            interest = subscription.interest()
            source = await self._hub.source(subscription.stream)
            who = scope.get(KEY_NAME) or scope.get("client", ("",))[0]
            await self._hub.announce(source, interest, who)
        except Exception as error:
            answer = problem_of(error)
            if answer is None or answer.status not in _PASSING:
                raise
            await _later(send)
            return
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b""})
            source.tail.withdraw(interest)
            return
        reader = Reader(interest, subscription.named, self._context.limits, who)
        counts = self._context.counts
        counts.sse_clients += 1
        gone = asyncio.ensure_future(_left(receive))
        gone.add_done_callback(lambda _: reader.end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            connection = Connection(reader, scope.get(WAY_OUT, send), counts)
            # In a task of its own: each time that it is woken, it is not woken through all that lies around.
            with nullcontext() if self._watch is None else self._watch(request, reader.drop):
                reader.task = asyncio.create_task(self._serve(connection, source, request))
                await reader.task
        except asyncio.CancelledError:
            # Too slow a client is let go: it holds what it has, and comes back for the rest.
            if not reader.dropped:
                raise
        finally:
            gone.cancel()
            source.tail.leave(reader)
            source.tail.withdraw(interest)
            counts.sse_clients -= 1
            counts.sse_dropped += reader.dropped

    async def _serve(self, connection: Connection, source: Source, request: Request) -> None:
        reader, tail = connection.reader, source.tail
        await connection.send(frame.retry(random.randint(*_COME_BACK_AFTER)))  # noqa: S311
        given = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        mark = None if not given else _parsed(given, tail)
        try:
            if not given:
                tail.join(reader)
                joined_at = tail.mark
            elif mark is None:
                raise Gone("unknown")
            else:
                self._context.counts.sse_resumed += 1
                joined_at = tail.mark
                async for entries in source.replay.catch_up(reader, mark):
                    # Of the last ones it has just joined.
                    joined_at = tail.mark
                    await connection.send_all(entries)
            if not reader.pending:
                await connection.send(frame.place(str(joined_at)))
        except Gone as error:
            self._context.counts.sse_reset += 1
            tail.join(reader)
            await connection.send(frame.reset(str(tail.mark), error.reason))
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            # It comes back with where it is by now.
            logger.info("a reader could not be served what it missed: %s", error)
            reader.end()
        reader.straight = connection.straight
        # It may have joined after the others were sent away.
        while not reader.ended and not self._context.draining:
            await connection.send(reader.take())
            if reader.beaten:
                reader.beaten = False
                if self._check is not None and not await self._check(request):
                    break
            await reader.wait()
            if reader.held_up is not None:
                await connection.finish(reader.held_up)
        if not reader.dropped:
            await connection.send(reader.take(), more=False)


class Connection:
    """The way to one client."""

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
            # The client has just left: uvloop says so where it writes.
            self.reader.end()
            return
        finally:
            self.reader.sending = False
        self._counts.sse_bytes += len(body)

    @property
    def straight(self) -> Callable[[Message], Rest | None] | None:
        """How to send without waking anybody, where it is known what sending does: uvicorn's own writes, and
        waits only for a client that takes too little.
        """
        owner = getattr(self._send, "__self__", None)
        return self._step if type(owner).__module__.startswith("uvicorn.protocols.") else None

    def _step(self, message: Message) -> Rest | None:
        coroutine = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            return None
        except (OSError, RuntimeError):
            self.reader.end()
            return None
        return Rest(coroutine, waits_for)

    async def finish(self, rest: Rest) -> None:
        """Wait for a client that takes too little."""
        self.reader.held_up = None
        self.reader.sending = True
        try:
            await rest
        except (OSError, RuntimeError):
            self.reader.end()
        finally:
            self.reader.sending = False

    async def send_all(self, entries: Iterable[Entry]) -> None:
        """Those that were missed. The client's pace is the pace."""
        frames = [entry.frame(self.reader.named) for entry in entries]
        for first in range(0, len(frames), _AT_ONCE):
            part = frames[first : first + _AT_ONCE]
            await self.send(b"".join(part))
            self._counts.sse_events += len(part)


async def _later(send: Send) -> None:
    """Has a client come back. A browser that is told 503 never would."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    body = frame.retry(random.randint(*_COME_BACK_MUCH_LATER))  # noqa: S311
    await send({"type": "http.response.body", "body": body})


async def _left(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _parsed(given: str, tail: Tail) -> Mark | None:
    return tail.earliest if given == EARLIEST else Mark.parse(given)
