"""An HTTP server whose connections are bounded in each of their states. Needs the extra `server`.

uvicorn's protocol parses requests and runs the application. This module accepts the connections, and says how
many may be in a state, for how long, and how many bytes they may hold (ADR 48).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import heapq
import logging
import math
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from email.utils import formatdate
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pgmb.server import Application
from pgmb.services.http_settings import HttpSettings
from pgmb.services.resources import raise_file_limit

logger = logging.getLogger("pgmb.services")


class State(Enum):
    """What a connection waits for. Each state has a bound in `BOUNDS`."""

    HANDSHAKE = "TLS handshake"
    HEAD = "request"
    """The first byte of a request, or the rest of its line and headers."""
    BODY = "request body"
    """The rest of a body, with its trailer."""
    ANSWER = "answer"
    """The application."""
    IDLE = "next request"
    CLOSING = "closing"
    """The client: the server has closed the connection and still has something to send."""


class Bound(NamedTuple):
    seconds: float
    number: int
    """Connections in this state. Beyond it, the server closes the oldest of the address that has the most."""


BOUNDS: Final[Mapping[State, Bound]] = {
    State.HANDSHAKE: Bound(10, 512),
    State.HEAD: Bound(10, 512),
    State.BODY: Bound(60, 512),
    # The application bounds its answers: long polls and event streams have places of their own.
    State.ANSWER: Bound(math.inf, 1 << 30),
    # Longer than proxies keep an idle connection: they would use one that the server is closing.
    State.IDLE: Bound(75, 1000),
    State.CLOSING: Bound(60, 256),
}
HEAD_BYTES: Final = 64 << 10
"""Of a request's line and headers, and of a body's framing and trailer."""
HEAD_FIELDS: Final = 200
QUEUED_REQUESTS: Final = 16
"""Requests that a client may send ahead. The connection ends after the answers to so many."""
LINGER_BYTES: Final = 4 << 20
"""After an early answer the server reads and discards up to this much. Closing at once would reset the
connection before the client has read the answer."""
LINGER_SECONDS: Final = 2.0
HELD_BYTES: Final = 32 << 20
"""Of all connections together: unread answers, and likewise bodies that the application has not read."""
UNREAD_SECONDS: Final = 30.0
SLOWEST_BYTES: Final = 30 << 10
"""A client that takes less than this of an answer in UNREAD_SECONDS is disconnected."""
_BEHIND_SECONDS: Final = 5.0
"""A client that has taken everything within this time does not count as slow."""
_SPARE_FILES: Final = 100
_ACCEPTED_AT_ONCE: Final = 32
_REQUESTS_AT_ONCE: Final = 8
"""Requests that begin before the server looks at its connections again."""
_SWEEP_SECONDS: Final = 0.5
_BACKLOG_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_TCP_BYTES_ACKED: Final = 120
"""The offset of tcpi_bytes_acked in Linux's struct tcp_info."""


def spare_the_collector() -> None:
    """Look for garbage less often: thousands of connections are many objects, which all stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class Server:
    """Accepts the connections of a listening socket and serves them until `stop`."""

    def __init__(self, application: Application, settings: HttpSettings) -> None:
        self.config = uvicorn.Config(
            application,
            http=Connection,
            # The service starts and closes the application, which logs requests itself.
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            server_header=False,
            proxy_headers=settings.proxy_headers,
            forwarded_allow_ips=settings.forwarded_allow_ips,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_keep_alive=round(BOUNDS[State.IDLE].seconds),
        )
        self.config.load()
        self.state = ServerState()
        self._finish_within = settings.finish_within
        self._bounds = {**BOUNDS, State.HEAD: BOUNDS[State.HEAD]._replace(seconds=settings.head_within)}
        self._most = max(16, raise_file_limit() - settings.connections - _SPARE_FILES)
        self._members: dict[State, dict[Member, None]] = {state: {} for state in State}
        self._paused: set[Connection] = set()
        """Those whose body the application does not read as fast as it comes."""
        self._requests: OrderedDict[str, deque[tuple[Connection, Callable[[], None]]]] = OrderedDict()
        """Those that have not begun, by address."""
        self._beginning: asyncio.Handle | None = None
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._told_at = -math.inf
        self._closed: Counter[tuple[str, State]] = Counter()

    @property
    def connections(self) -> set[Connection]:
        """Those that have a protocol."""
        return cast("set[Connection]", self.state.connections)

    async def serve(self, listening: socket.socket) -> None:
        """Serve until cancelled. Ends with an error if accepting or sweeping fails."""
        self._set_date()
        self._listening = listening
        async with asyncio.TaskGroup() as group:
            self._accepting = group.create_task(self._accept(listening), name="http accept")
            self._sweeping = group.create_task(self._sweep(), name="http sweep")

    async def stop(self) -> None:
        """Accept nothing more, wait for requests under way, then close every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
            # After the loop no longer waits for it.
            await asyncio.wait([self._accepting])
        if self._listening is not None:
            self._listening.close()
        for member in list(self._members[State.HANDSHAKE]):
            member.give_up()
        for connection in list(self.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._finish_within):
                while self.connections or self.state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        if self.state.tasks:
            logger.warning("http: cancelling %d requests that do not end", len(self.state.tasks))
        for task in list(self.state.tasks):
            task.cancel()
        if self.state.tasks:
            await asyncio.wait(list(self.state.tasks), timeout=1)
        for connection in list(self.connections):
            connection.transport.abort()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def begin(self, connection: Connection, start: Callable[[], None]) -> None:
        """Start a request in its address's turn: others do not wait for thousands of requests."""
        self._requests.setdefault(connection.address, deque()).append((connection, start))
        if self._beginning is None:
            self._beginning = connection.loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(_REQUESTS_AT_ONCE):
            if not self._requests:
                break
            address, waiting = self._requests.popitem(last=False)
            connection, start = waiting.popleft()
            if waiting:
                self._requests[address] = waiting
            if not connection.transport.is_closing():
                start()
        # What has begun runs first, and what has arrived meanwhile is read.
        self._beginning = asyncio.get_running_loop().call_soon(self._begin_some) if self._requests else None

    def enter(self, member: Member, state: State | None) -> None:
        """Move a connection to a state; None if it has ended."""
        if member.state is not None:
            self._members[member.state].pop(member, None)
        member.state = state
        if state is not None:
            member.since = time.monotonic()
            self._members[state][member] = None

    async def _accept(self, listening: socket.socket) -> None:
        loop, number = asyncio.get_running_loop(), 0
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:
                # A client that is gone already, or too many open files, of which another process may be the
                # reason.
                if error.errno in _BACKLOG_FULL:
                    self._make_room()
                    await asyncio.sleep(0.05)
                continue
            if sum(map(len, self._members.values())) >= self._most and not self._make_room():
                accepted.close()
                continue
            if len(self._members[State.HANDSHAKE]) >= self._bounds[State.HANDSHAKE].number:
                self._close(_of_the_largest(self._members[State.HANDSHAKE], 1))
            Handshake(self, accepted, str(peer[0]))
            # sock_accept does not yield while clients wait: none would get beyond its handshake. But a client
            # waits behind all connections of others that wait to be accepted.
            number += 1
            if number % _ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def connect(self, accepted: socket.socket) -> None:
        """Do the handshake if there is one, and hand the connection to its protocol."""
        context = self.config.ssl
        given: dict[str, Any] = {}
        if context is not None:
            seconds = self._bounds[State.HANDSHAKE].seconds
            given = {"ssl": context, "ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": 5.0}
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self), accepted, **given
            )

    def _make_room(self) -> bool:
        """Close connections that nobody needs now. Returns whether there were any."""
        # Some at once, because finding them takes a while when there are many.
        waiting = [
            member
            for state in (State.HANDSHAKE, State.HEAD, State.IDLE, State.BODY, State.CLOSING)
            for member in self._members[state]
        ]
        self._close(_of_the_largest(waiting, 16))
        return bool(waiting)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._set_date()
            now = time.monotonic()
            for connection in list(self.connections):
                connection.look(now)
            for state, bound in self._bounds.items():
                members = self._members[state]
                # In the order in which they came to the state.
                late = []
                for member in members:
                    if now - member.since < bound.seconds:
                        break
                    late.append(member)
                self._close(late)
                if (over := len(members) - bound.number) > 0:
                    self._close(_of_the_largest(list(members), over))
            self._bound_unread(now)
            if self._closed and now - self._told_at >= 10:
                self._tell(now)

    def _bound_unread(self, now: float) -> None:
        behind: list[Connection] = [one for one in self.connections if one.unread]
        over = sum(one.unread for one in behind) - HELD_BYTES
        behind = [one for one in behind if now - one.unread_since > _BEHIND_SECONDS]
        for one in sorted(behind, key=lambda one: one.unread_since):
            if over <= 0:
                return
            over -= one.unread
            self._close([one])

    def bound_bodies(self, connection: Connection) -> None:
        """Close some connections if bodies that the application has not read exceed HELD_BYTES."""
        self._paused = {one for one in self._paused if len(one.cycle.body) > HIGH_WATER_LIMIT} | {connection}
        if sum(len(one.cycle.body) for one in self._paused) > HELD_BYTES:
            # Some at once, because finding them takes a while.
            for one in _of_the_largest(sorted(self._paused, key=lambda one: one.since), 16):
                one.cycle.body = bytearray()
                self._close([one])

    def _close(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.state is not None:
                self._closed[member.address, member.state] += 1
            member.give_up()

    def _tell(self, now: float) -> None:
        closed, self._closed, self._told_at = self._closed, Counter(), now
        for (address, state), number in closed.most_common(3):
            logger.info("http: closed %d connections of %s that waited for: %s", number, address, state.value)

    def _set_date(self) -> None:
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]


class Member:
    """A connection in a state."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.state: State | None = None
        self.since = 0.0

    def give_up(self) -> None:
        """Close it."""
        raise NotImplementedError


AnyMember = TypeVar("AnyMember", bound=Member)


def _of_the_largest(members: Iterable[AnyMember], number: int) -> list[AnyMember]:
    """The oldest of those addresses that have the most."""
    by_address: dict[str, deque[AnyMember]] = {}
    for member in members:
        by_address.setdefault(member.address, deque()).append(member)
    held = [(-len(theirs), address) for address, theirs in by_address.items()]
    heapq.heapify(held)
    taken: list[AnyMember] = []
    while held and len(taken) < number:
        count, address = heapq.heappop(held)
        taken.append(by_address[address].popleft())
        if count < -1:
            heapq.heappush(held, (count + 1, address))
    return taken


class Handshake(Member):
    """A connection that was accepted and has no protocol yet."""

    def __init__(self, server: Server, accepted: socket.socket, address: str) -> None:
        super().__init__(address)
        self._server = server
        self._socket = accepted
        server.enter(self, State.HANDSHAKE)
        self._task = asyncio.create_task(server.connect(accepted), name="http handshake")
        self._task.add_done_callback(self._done)

    def give_up(self) -> None:
        self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._server.enter(self, None)
        if task.cancelled():
            # If the task has not begun, nobody else has the socket.
            self._socket.close()
        elif (error := task.exception()) is not None:
            logger.error("http: accepting a connection failed", exc_info=error)


class Connection(HttpToolsProtocol, Member):
    """uvicorn's protocol, which tells its server what it waits for, and counts what a client sends."""

    def __init__(self, server: Server) -> None:
        HttpToolsProtocol.__init__(self, server.config, server.state, {})
        Member.__init__(self, "")
        self._server = server
        self._receiving: State | None = State.HEAD
        """HEAD or BODY while a request arrives, None between two."""
        self._unparsed = 0
        """Bytes since the request began, or since the last part of its body."""
        self._deaf = False
        """Whether it takes no more requests: it ends after the answers to those that it has."""
        self._lingered = 0
        self.unread = 0
        """Bytes of answers that the client has not taken, as far as this process holds them."""
        self.unread_since = 0.0
        self._taken_at = 0.0
        self._taken: int | None = 0

    # The transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._server.enter(self, State.HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.enter(self, None)
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        if not self._deaf:
            super().data_received(data)
        if self._deaf or (self._receiving is State.BODY and self.cycle.response_complete):
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.abort()
        elif self._receiving is not None and self._unparsed > HEAD_BYTES:
            # The parser keeps a field until all of it is there.
            self.refuse(431)

    def look(self, now: float) -> None:
        """Notice that the connection is closing, and what the client does not read."""
        if self.transport.is_closing() and self.state is not State.CLOSING:
            self._server.enter(self, State.CLOSING)
        self.unread = self.transport.get_write_buffer_size()
        if not self.unread:
            self.unread_since = 0.0
        elif not self.unread_since:
            self.unread_since = self._taken_at = now
            self._taken = self._acked()
        elif now - self._taken_at > UNREAD_SECONDS:
            before, self._taken, self._taken_at = self._taken, self._acked(), now
            if before is not None and self._taken is not None and self._taken - before < SLOWEST_BYTES:
                self.give_up()

    def _acked(self) -> int | None:
        """Bytes that the client's system has taken. None if this system does not tell, as only Linux does."""
        given = self.transport.get_extra_info("socket")
        try:
            info = given.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_ACKED + 8)
            return int(struct.unpack_from("Q", info, _TCP_BYTES_ACKED)[0])
        except (AttributeError, OSError, struct.error):
            return None

    # The parser

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._server.begin(self, partial(super()._start_asgi_task, cycle, app))

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        super().on_message_begin()
        self._unparsed = self._lingered = 0
        self._wait(State.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are discarded: uvicorn would add them to the headers of a request that is being answered.
        if self._receiving is State.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES or len(self.headers) > HEAD_FIELDS:
            self.refuse(431)
        elif len(self.pipeline) >= QUEUED_REQUESTS:
            self._end_after_answers()
        else:
            super().on_headers_complete()
            self._wait(State.BODY)

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._unparsed = 0
        super().on_body(body)
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._server.bound_bodies(self)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()
            self._wait(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._deaf and not self._answering:
            self._linger()
        elif self._receiving is None:
            self._wait(None)

    def _wait(self, receiving: State | None) -> None:
        self._receiving = receiving
        state = receiving or (State.ANSWER if self._answering else State.IDLE)
        if state is not self.state and self.state is not None:
            self._server.enter(self, state)

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete)

    # Refusing

    def refuse(self, status: int) -> None:
        """Answer with an error, and end. If earlier requests await answers, only end, after these."""
        arriving = self._receiving is State.BODY
        if arriving and (self.pipeline or self.cycle.response_started):
            self.transport.abort()
            return
        if arriving:
            # The application is told that the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self._answering:
            self._end_after_answers()
            return
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self._linger()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400)

    def give_up(self) -> None:
        state, busy = self.state, self._answering
        self._server.enter(self, None)
        if state is State.HEAD and not busy and not self.transport.is_closing():
            self.transport.write(STATUS_LINE[408] + b"content-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
            return
        if self.unread:
            # The system would go on offering it to the client. So it resets the connection.
            with suppress(AttributeError, OSError):
                given = self.transport.get_extra_info("socket")
                given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _end_after_answers(self) -> None:
        self._deaf, self._receiving = True, None
        if self._answering:
            self._wait(None)
        else:
            self._linger()

    def _linger(self) -> None:
        """Read on for a while, so that the client can read the answer."""
        self._deaf, self._receiving = True, None
        self._server.enter(self, State.CLOSING)
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
