"""Requests: events whose handler's result comes back to the publisher.

A request is an event with a header that names where its answer goes: a topic of the process that asks, on
stream `replies`. The answer is an event too, published in the transaction that acks the request. So a request
whose worker died is handled again, and only one answer is ever committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias
from uuid import uuid4

import msgspec

from pgmb._async.broker import AsyncBroker
from pgmb._core import loggers, wire
from pgmb._core.concurrency import Pace
from pgmb._core.wire import may_go_on
from pgmb.app.delivery import Delivery
from pgmb.app.handler import Respond
from pgmb.app.kept import kept
from pgmb.app.outcome import Late, Reject, Retry, describe, message, trace
from pgmb.app.settling import DATABASE_ERRORS
from pgmb.errors import HistoryGone, InvalidArgument, NoAnswer, PermissionDenied, RequestFailed, translated
from pgmb.types import Position

logger = loggers.logger("pgmb.app")

Connect: TypeAlias = Callable[[], Awaitable[AsyncBroker]]
"""Returns the broker of the running event loop."""

REPLIES: Final = "replies"
_KEEP_REPLIES: Final = 3600
_HEADER: Final = "pgmb-request"
_ANSWER: Final = "select pgmb.publish(%s::text, %s::text::json, key => %s::text, stream => %s::text)"
_ANSWER_AND_ACK: Final = _ANSWER + ", pgmb.ack(%s::uuid, array[%s::bigint])"
_GLANCE: Final = "select seq, payload::text from pgmb.log_replies where seq > %s::bigint and topic = %s::text"
_FIRST_LOOK_SECONDS: Final = 0.0025
_READ_EVERY_SECONDS: Final = 0.25
_IDLE_SECONDS: Final = 60.0
_PAGE_EVENTS: Final = 1000


class _Reply(msgspec.Struct, omit_defaults=True):
    """The payload of an answer."""

    request: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    """The type of what the handler raised."""
    message: str = ""
    trace: str = ""


class Requests:
    """What one event loop has asked and waits for. It reads the stream of replies only while it waits."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._topic = f"reply.{uuid4().hex}"
        self._begun = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    async def ask(self, topic: str, payload: Any, within: float, headers: Any, **options: Any) -> Any:
        given: dict[str, Any] = headers or {}
        if type(given) is not dict or _HEADER in given:
            raise InvalidArgument(f"headers must be a dictionary without {_HEADER!r}, got {headers!r}")
        number = uuid4().hex
        answer = asyncio.get_running_loop().create_future()
        told = {**given, _HEADER: {"topic": self._topic, "id": number}}
        limit = asyncio.timeout(within)
        try:
            async with limit:
                await self._begin()
                self._waiting[number] = answer
                await self._broker.publish(topic, payload, headers=told, **options)
                self._asked.set()
                return await answer
        except TimeoutError:
            if limit.expired():
                raise NoAnswer(f"no answer to {topic!r} within {within:g} s") from None
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _begin(self) -> None:
        """Have replies read from a position before the request."""
        async with self._begun:
            if self._reading is None or self._reading.done():
                await create_replies(self._broker)
                after = await self._broker.position(REPLIES)
                self._after = after
                self._reading = asyncio.create_task(kept("reading replies", self._read), name="pgmb replies")

    async def _read(self) -> None:
        """Until nobody has waited for a while."""
        after = self._after
        # The pause grows by a tenth: an answer is found at most 10 % later than it was published.
        pace, waited_for = Pace(_FIRST_LOOK_SECONDS, growth=1.1), time.monotonic()
        head, read_at = after.seq, time.monotonic()
        while time.monotonic() - waited_for < _IDLE_SECONDS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pace.pause() if self._waiting else _IDLE_SECONDS):
                    await self._asked.wait()
            if self._asked.is_set():
                self._asked.clear()
                pace.found()
                await asyncio.sleep(pace.pause())
            if not self._waiting:
                continue
            waited_for = time.monotonic()
            try:
                head = await self._glance(head)
                if waited_for - read_at >= _READ_EVERY_SECONDS:
                    after, read_at = await self._look(after), waited_for
                    head = max(head, after.seq)
            except HistoryGone:
                after = await self._broker.position(REPLIES)
            except DATABASE_ERRORS as error:
                logger.warning("cannot read replies: %s; trying again", str(error).strip())

    async def _glance(self, head: int) -> int:
        """Take answers with higher numbers than any before: most of them, and cheaper than a look."""
        with translated():
            async with self._broker.own_connection() as conn:
                answers = await (await conn.execute(_GLANCE, (head, self._topic))).fetchall()
        for seq, payload in answers:
            self._take(payload)
            head = max(head, seq)
        return head

    async def _look(self, after: Position) -> Position:
        """Take all answers since the position, also those that were committed out of turn."""
        upto, seq = await self._broker.position(REPLIES), 0
        more = upto != after
        while more:
            events = await self._broker.between(REPLIES, after, upto, seq, _PAGE_EVENTS, lake=False)
            for event in events:
                if event.topic == self._topic:
                    self._take(event.raw)
            seq, more = (events[-1].seq, may_go_on(events, _PAGE_EVENTS)) if events else (0, False)
        return upto

    def _take(self, payload: str | bytes) -> None:
        try:
            reply = msgspec.json.decode(payload, type=_Reply)
        except (msgspec.MsgspecError, UnicodeError) as error:
            self._refuse(payload, error)
            return
        answer = self._waiting.get(reply.request)
        # Else it came too late, or is the second answer to an event that was rejected.
        if answer is None or answer.done():
            return
        if reply.error is not None:
            answer.set_exception(_raised(reply))
            return
        try:
            answer.set_result(msgspec.json.decode(reply.result))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            answer.set_exception(RequestFailed(f"the answer cannot be decoded: {error}"))

    def _refuse(self, payload: str | bytes, error: Exception) -> None:
        """Fail the request that an unreadable answer names. Anybody who may publish may have written it."""
        answer = None
        with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
            # Python's own decoder takes what msgspec refuses.
            answer = self._waiting.get(json.loads(payload).get("request"))
        if answer is None:
            logger.warning("not an answer to a request: %s", error)
        elif not answer.done():
            answer.set_exception(RequestFailed(f"the answer cannot be decoded: {error}"))


async def create_replies(broker: AsyncBroker) -> None:
    """Create the stream of replies, where this role may. Else it must be there: whoever uses it is told."""
    with contextlib.suppress(PermissionDenied):
        await broker.create_stream(REPLIES, keep_for=_KEEP_REPLIES)


def _raised(reply: _Reply) -> RequestFailed:
    """What the handler raised. Never an exception of its class: a name does not say whose class it is."""
    failed = RequestFailed(f"{reply.error}: {reply.message}" if reply.message else str(reply.error))
    failed.kind, failed.trace = str(reply.error), reply.trace
    return failed


def answering(connect: Connect) -> Respond:
    """What calls a handler and, for a request, publishes what it returns or raises."""

    async def answer(delivery: Delivery[Any], call: Callable[[], Awaitable[Any]]) -> None:
        asked = _asked(delivery)
        try:
            result = await call()
            if asked is None:
                return
            reply = _Reply(asked.id, msgspec.Raw(wire.json(result)))
        except (Retry, Late, asyncio.CancelledError):
            raise
        except BaseException as error:
            if asked is None:
                raise
            await _send(connect, delivery, asked, _error(asked, error), acks=not isinstance(error, Reject))
            if isinstance(error, Reject):
                raise
            logger.warning("a handler raised to its caller: %s (%s)", describe(error), delivery.id)
        else:
            await _send(connect, delivery, asked, reply, acks=True)

    return answer


class _Asked(msgspec.Struct):
    """The header of a request."""

    topic: str
    id: str


def _asked(delivery: Delivery[Any]) -> _Asked | None:
    header = (delivery.headers or {}).get(_HEADER)
    return None if header is None else msgspec.convert(header, _Asked)


def _error(asked: _Asked, error: BaseException) -> _Reply:
    said = message(error)
    return _Reply(asked.id, error=type(error).__name__, message=said, trace=trace(error) or said)


async def _send(
    connect: Connect, delivery: Delivery[Any], asked: _Asked, reply: _Reply, *, acks: bool
) -> None:
    """Publish the answer and ack the request, in one statement."""
    broker, payload = await connect(), msgspec.json.encode(reply).decode()
    # The key too: whoever erases the events of a key erases their answers.
    answer = (asked.topic, payload, delivery.key, REPLIES)
    with translated():
        async with broker.own_connection() as conn:
            if acks:
                delivery.progress.taken.add(delivery.seq)
                await conn.execute(_ANSWER_AND_ACK, (*answer, delivery.progress.lease.id, delivery.seq))
            else:
                await conn.execute(_ANSWER, answer)
