"""The event stream endpoint: routes, subscriptions, and the readers of this process.

`EventStream` answers one request. `Hub` keeps one `Tail` per stream for all of them.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from pgmb._async.broker import AsyncBroker
from pgmb._core import chance
from pgmb.errors import PgmbError
from pgmb.server.application import DIRECT_SEND, Application, Context
from pgmb.server.instrumentation import KEY_NAME
from pgmb.server.limits import Limits, Places, has_place
from pgmb.server.problems import Problem, busy, invalid, problem_of
from pgmb.server.sse.connection import Connection, Reader
from pgmb.server.sse.frames import ResumeToken, position_frame, reset_frame, retry_frame
from pgmb.server.sse.history import StreamLog
from pgmb.server.sse.matching import Interest, Sieve
from pgmb.server.sse.replay import HistoryMissing, Replay
from pgmb.server.sse.tail import FilterTail, StreamTail, Tail
from pgmb.server.tasks import cancel_and_wait

Value = TypeVar("Value")
Decision: TypeAlias = Callable[[Request], "Value | Awaitable[Value]"]

_PRINCIPAL: Final = "pgmb.principal"
_BEGUN: Final = "pgmb.sse_begun"
"""The key in the scope that says that the response has begun."""
_PARAMETERS: Final = {"topic", "equals", "filter", "params", "event", "ticket", "last_event_id"}


def routes(context: Context) -> list[BaseRoute]:
    """`GET /v1/streams/{stream}/events`, for keys, sessions and tickets with the scope `read`."""
    hub = Hub(context)

    async def subscribe(request: Request) -> Subscription:
        stream = request.path_params["stream"]
        request.scope[_PRINCIPAL] = await context.access.need(request, "read", stream, ticket=True)
        return _subscribeed(request, stream)

    def watch(request: Request, revoked: Callable[[], None]) -> AbstractContextManager[None]:
        # A ticket is used up by this request. The connection ends when the key that issued it is revoked.
        return context.access.watching(request.scope[_PRINCIPAL], revoked)

    stream = EventStream(context, hub, subscribe, watch=watch)
    return [Route("/v1/streams/{stream}/events", stream, methods=["GET"], name="events")]


def create_sse_app(
    dsn: str = "",
    *,
    authorize: Decision[bool],
    subscription: Decision[Subscription | None],
    broker: AsyncBroker | None = None,
    limits: Limits | None = None,
) -> Application:
    """An ASGI app with server-sent events at `/`, to be mounted into an application with its own auth.

    `authorize` decides whether a request may read at all, `subscription` what it may read; None tells the
    client not to reconnect. Both may be async and may raise Starlette's HTTPException. `authorize` is called
    again at every heartbeat.
    """

    def part(context: Context) -> list[BaseRoute]:
        async def subscribe(request: Request) -> Subscription | None:
            if not await _resolved(authorize(request)):
                raise Problem(401, "unauthorised", "not allowed")
            return await _resolved(subscription(request))

        async def check(request: Request) -> bool:
            return bool(await _resolved(authorize(request)))

        return [
            Route("/", EventStream(context, Hub(context), subscribe, check), methods=["GET"], name="events")
        ]

    return Application(dsn, parts=[part], broker=broker, limits=limits)


async def _resolved(said: Value | Awaitable[Value]) -> Value:
    if inspect.isawaitable(said):
        return await said
    return said


def _subscribeed(request: Request, stream: str) -> Subscription:
    query = request.query_params
    if odd := set(query) - _PARAMETERS:
        raise invalid(
            f"not a parameter: {', '.join(sorted(odd))}", f"Known are {', '.join(sorted(_PARAMETERS))}."
        )
    event = query.get("event", "message")
    if event not in ("message", "topic"):
        raise invalid("event must be message or topic")
    return Subscription(
        stream=stream,
        topics=tuple(query.getlist("topic")),
        equals=_object(query.get("equals"), "equals"),
        filter=query.get("filter"),
        params=_object(query.get("params"), "params"),
        named=event == "topic",
    )


def _object(text: str | None, name: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise invalid(f"{name} must be a JSON object", str(error)) from error


logger = logging.getLogger("pgmb.server")

_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    # Stops nginx and compatible proxies from buffering events.
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
_RETRY_MILLISECONDS: Final = (1000, 3000)
"""A random delay, so that clients do not reconnect all at once when a process ends."""
_LONG_RETRY_MILLISECONDS: Final = (3000, 10_000)
_TEMPORARY: Final = (429, 503)
"""Statuses that pass: the database restarts, or this process ends or is full."""
EARLIEST: Final = "earliest"


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may read. With `named`, an SSE event is named after its topic instead of `message`.

    condition: an SQL expression over e, the event, and s.params, as of a queue. The server's role needs
        `pgmb_conditions`.
    """

    stream: str = "main"
    topics: tuple[str, ...] = ()
    equals: Mapping[str, Any] | None = None
    filter: str | None = None
    params: Mapping[str, Any] | None = None
    condition: str | None = None
    named: bool = False


@dataclass(frozen=True)
class EventStream:
    """An ASGI endpoint for one event stream."""

    context: Context
    hub: Hub
    subscribe: Callable[[Request], Awaitable[Subscription | None]]
    """Returns what a request may read; None answers 204, after which browsers do not reconnect."""
    check: Callable[[Request], Awaitable[bool]] | None = None
    """Called at every heartbeat; False ends the connection."""
    watch: Callable[[Request, Callable[[], None]], AbstractContextManager[None]] | None = None
    """Calls back when access is revoked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            subscription = await self.subscribe(request)
            if subscription is None:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            interest = Interest.of(subscription.topics, subscription.equals)
            sieve = Sieve.of(subscription.filter, subscription.params, subscription.condition)
            client_id = scope.get(KEY_NAME) or scope.get("client", ("",))[0]
            with self.hub.place(client_id):
                source = await self.hub.source(subscription.stream, sieve, client_id)
                reader = Reader(interest, subscription.named, self.context.limits, client_id)
                await self._answer(request, send, source, reader)
        except Exception as error:
            answer = problem_of(error)
            if answer is None or answer.status not in _TEMPORARY or request.scope.get(_BEGUN):
                raise
            await _send_retry_later(send)

    async def _answer(self, request: Request, send: Send, source: Source, reader: Reader) -> None:
        scope = request.scope
        scope[_BEGUN] = True
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        counts = self.context.counts
        counts.sse_clients += 1
        disconnect = asyncio.ensure_future(_disconnected(request.receive))
        disconnect.add_done_callback(lambda _: reader.end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            connection = Connection(reader, scope.get(DIRECT_SEND, send), counts)
            # Its own task wakes directly, not through every middleware's coroutine.
            with nullcontext() if self.watch is None else self.watch(request, reader.drop):
                reader.task = asyncio.create_task(self._serve(connection, source, request))
                await reader.task
        except asyncio.CancelledError:
            # The client was too slow. It reconnects with its last id and gets the rest.
            if not reader.dropped:
                raise
        finally:
            disconnect.cancel()
            source.tail.leave(reader)
            counts.sse_clients -= 1
            counts.sse_dropped += reader.dropped

    async def _serve(self, connection: Connection, source: Source, request: Request) -> None:
        reader, tail = connection.reader, source.tail
        await connection.send(retry_frame(chance.whole(*_RETRY_MILLISECONDS)))
        given = request.headers.get("last-event-id") or request.query_params.get("last_event_id")
        token = tail.earliest if given == EARLIEST else ResumeToken.parse(given or "")
        try:
            if not given:
                tail.join(reader)
                joined_at = tail.token
            elif token is None:
                raise HistoryMissing("unknown")
            else:
                self.context.counts.sse_resumed += 1
                joined_at = tail.token
                async for entries in source.replay.catch_up(tail, reader, token):
                    # With the last entries the reader has joined the tail.
                    joined_at = tail.token
                    await connection.send_all(entries)
            # One that was dropped before it joined has not come so far.
            if not reader.pending and not reader.dropped:
                await connection.send(position_frame(str(joined_at)))
        except HistoryMissing as error:
            self.context.counts.sse_reset += 1
            tail.join(reader)
            await connection.send(reset_frame(str(tail.token), error.reason))
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            # The client reconnects with the last id that it received.
            logger.info("replaying missed events failed: %s", error)
            reader.end()
        # Draining may have begun before this reader joined.
        while not reader.ended and not self.context.draining:
            await connection.send_pending()
            if reader.heartbeat_seen:
                reader.heartbeat_seen = False
                if not await self._still_allowed(request):
                    break
            await reader.wait()
        await connection.send_pending()
        if not reader.dropped:
            await connection.send(b"", more=False)

    async def _still_allowed(self, request: Request) -> bool:
        """Whether the check holds. If it raises, the connection ends, and the client reconnects."""
        if self.check is None:
            return True
        try:
            return await self.check(request)
        except HTTPException:
            return False
        except Exception as error:
            if problem_of(error) is None:
                logger.exception("checking a reader's access failed")
            else:
                logger.info("checking a reader's access failed: %s", error)
            return False


async def _send_retry_later(send: Send) -> None:
    """Tell the client to reconnect later. On a 503, EventSource would give up."""
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    body = retry_frame(chance.whole(*_LONG_RETRY_MILLISECONDS))
    await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


HEARTBEAT_EVERY: Final = 15.0
_HEARTBEAT_SLICES: Final = 15
"""Heartbeats are spread: one slice of the readers at a time."""
_IDLE_HEARTBEATS: Final = 4
_IDLE_HEARTBEATS_OF_FILTERS: Final = 1
"""A tail without readers is closed after this many heartbeats: a filter costs queries."""
_MOST_FILTERS: Final = 100
"""Distinct filters per stream. Each costs a query per page of events."""
_MOST_COSTLY_FILTERS: Final = 4
"""Costly filters per stream."""
_REFUSED_SECONDS: Final = 60.0
_MOST_REFUSED: Final = 10_000


class Source(NamedTuple):
    """A stream that this process reads, or what passes a filter of it."""

    tail: Tail
    replay: Replay


class Hub:
    """The streams that this process reads, and their filters, opened on demand and closed when idle."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Much less than the limit of pending events, so that no reader exceeds it in one step.
        self._at_once = max(1, min(100, context.limits.pending_events // 4))
        self._places = Places(context.limits.clients)
        self._sources: dict[tuple[str, Sieve | None], Source] = {}
        self._refused: dict[Hashable, float] = {}
        """Filters that failed, and their clients, with the time until which they are refused."""
        self._opening = asyncio.Lock()
        self._heartbeats: asyncio.Task[None] | None = None
        context.on_drain(self.drain)
        context.on_close(self.close)

    def place(self, client_id: Hashable) -> AbstractContextManager[None]:
        """Hold a place for a reader. Raises Problem 503 if there is none for this client."""
        if not self._places.free(client_id):
            raise busy("too many readers on this process")
        return self._places.holding(client_id)

    async def source(self, stream: str, sieve: Sieve | None, client_id: Hashable) -> Source:
        """The source of a stream, or of what passes a filter of it; opened if necessary."""
        if self._context.draining:
            raise Problem(503, "draining", "this process is shutting down", headers={"Retry-After": "1"})
        self._assert_not_refused(sieve)
        async with self._opening:
            found = self._sources.get((stream, None))
            if found is None or found.tail.ended:
                found = self._sources[stream, None] = await self._open(stream)
            if sieve is not None:
                base, found = found, self._sources.get((stream, sieve))
                if found is None or found.tail.ended:
                    found = await self._open_filter(base, sieve, client_id)
                    self._sources[stream, sieve] = found
            found.tail.idle = 0
        return found

    async def drain(self) -> None:
        """End all connections. The clients reconnect to another process, or to this one after a restart."""
        for source in self._sources.values():
            for reader in list(source.tail.readers):
                reader.end()

    async def close(self) -> None:
        if self._heartbeats is not None:
            await cancel_and_wait(self._heartbeats)
        sources, self._sources = self._sources, {}
        for source in sources.values():
            await source.tail.close()

    async def _open(self, stream: str) -> Source:
        context = self._context
        log = StreamLog(context.broker, stream)
        subscription = context.broker.listener().subscribe(stream)
        tail = StreamTail(log, subscription, context.counts, self._at_once)
        try:
            await tail.start()
        except BaseException:
            subscription.close()
            raise
        if self._heartbeats is None:
            self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="pgmb heartbeats")
        return Source(tail, Replay(log, context.limits, context.counts))

    async def _open_filter(self, base: Source, sieve: Sieve, client_id: Hashable) -> Source:
        stream = cast("StreamTail", base.tail)
        costly = await stream.log.check(sieve)
        if costly:
            self._assert_not_refused(client_id)
        # First without those that nobody reads.
        for close_idle in (False, True):
            if close_idle:
                await self._close_idle(filters=0)
            most_costly = sum(tail.costly for tail in stream.filters) >= _MOST_COSTLY_FILTERS
            held = Counter(tail.client_id for tail in stream.filters)
            if has_place(held, client_id, _MOST_FILTERS) and not (costly and most_costly):
                counts = self._context.counts
                tail = FilterTail(stream, sieve, counts, self._at_once, costly=costly, failed=self._refuse)
                tail.client_id = client_id
                return Source(tail, base.replay)
        raise busy("too many different filters on this process")

    def _refuse(self, tail: FilterTail, readers: Sequence[Reader]) -> None:
        """Refuse a filter that failed for a minute, and costly filters of the same clients."""
        now = time.monotonic()
        self._refused = {slow: until for slow, until in self._refused.items() if until > now}
        for slow in (tail.sieve, *{reader.client_id for reader in readers}):
            if len(self._refused) < _MOST_REFUSED:
                self._refused[slow] = now + _REFUSED_SECONDS

    def _assert_not_refused(self, slow: Hashable) -> None:
        if self._refused.get(slow, 0.0) > time.monotonic():
            title = "the filter takes too long, or raises an error"
            raise Problem(422, "filter_too_slow", title, hint="Ask for less, or create a queue.")

    async def _send_heartbeats(self) -> None:
        for part in itertools.cycle(range(_HEARTBEAT_SLICES)):
            await asyncio.sleep(HEARTBEAT_EVERY / _HEARTBEAT_SLICES)
            for source in list(self._sources.values()):
                await source.tail.heartbeat(part, _HEARTBEAT_SLICES)
            if part == 0:
                async with self._opening:
                    await self._close_idle()

    async def _close_idle(self, filters: int = _IDLE_HEARTBEATS_OF_FILTERS) -> None:
        followed = {stream for stream, sieve in self._sources if sieve is not None}
        for (stream, sieve), (tail, _) in list(self._sources.items()):
            used = bool(tail.readers) or (sieve is None and stream in followed)
            tail.idle = 0 if used else tail.idle + 1
            if tail.ended or tail.idle > (_IDLE_HEARTBEATS if sieve is None else filters):
                del self._sources[stream, sieve]
                await tail.close()
