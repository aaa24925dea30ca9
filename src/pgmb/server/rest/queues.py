"""Operations on queues."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pgmb.errors import QueueNotFound
from pgmb.server.changes import audited
from pgmb.server.database import rows
from pgmb.server.problems import invalid
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.parsing import point, taken_elsewhere
from pgmb.server.rest.schemas import (
    Created,
    Dropped,
    Duration,
    Given,
    Integer,
    Name,
    Nothing,
    Number,
    Object,
    Patterns,
    Point,
    Rate,
    Settings,
    StreamName,
    Text,
)
from pgmb.types import NextEvents, QueueStatus, WhenFull

operations = Operations("queues")

SEE: Final = (Need("consume", "queue"), Need("inspect"))
CONSUME: Final = Need("consume", "queue")
OPERATE: Final = Need("operate")

Jitter = Annotated[float, msgspec.Meta(ge=0, le=1)]
Factor = Annotated[float, msgspec.Meta(ge=1, le=1e6)]
_QUEUE: Final = "/v1/queues/{queue}"


class Queues(msgspec.Struct):
    queues: list[QueueStatus]


class QueueDocument(msgspec.Struct):
    queue: str
    status: QueueStatus
    settings: Settings
    """One for each column of `pgmb.queue`."""


class Policy(Given):
    """Omitted settings keep their value or default. 0 removes a limit."""

    lease_for: Duration | None = None
    max_attempts: Integer | None = None
    backoff_base: Duration | None = None
    backoff_factor: Factor | None = None
    backoff_max: Duration | None = None
    backoff_jitter: Jitter | None = None
    max_in_flight: Integer | None = None
    rps: Rate | None = None
    ttl: Duration | None = None
    max_length: Number | None = None
    when_full: WhenFull | None = None


class AlterQueue(Policy):
    pass


class Bind(Given):
    """A filter that is given replaces the queue's. Without one the queue keeps its filter."""

    patterns: Patterns
    equals: Object | None = None
    filter: Text | None = None
    params: Object | None = None
    no_filter: bool = False
    """Remove the filter."""


class CreateQueue(Policy, kw_only=True):
    name: Name
    patterns: Patterns = msgspec.field(default_factory=lambda: ["#"])
    stream: StreamName = "main"
    starting: Point | None = None
    """By default `latest`."""
    ordered: bool | None = None
    lanes: Patterns | None = None
    shards: Integer | None = None
    fair_by: Text | None = None
    """`key` or `header:NAME`: what names an event's tenant."""
    equals: Object | None = None
    filter: Text | None = None
    params: Object | None = None


class Pause(Given):
    reason: Text | None = None


class Peek(Given):
    max: Annotated[int, msgspec.Meta(ge=1, le=200)] = 20
    look: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    """How many numbers of the log to look at."""


class Seek(Given):
    to: Point


@operations.add("GET", "/v1/queues", Need("consume", some=True), Need("inspect"))
async def list_queues(call: Call) -> Queues:
    """List the queues that the key may see: backlog, age, leases, retries and dead letters."""
    may = call.principal.may
    found = await call.broker.queue_status()
    return Queues([one for one in found if may("inspect") or may("consume", one.queue)])


@operations.add("GET", _QUEUE, *SEE)
async def show_queue(call: Call, queue: Name) -> QueueDocument:
    """Get a queue: its settings and status."""
    settings = await _settings(call, queue)
    return QueueDocument(queue, await _standing(call, queue), settings)


@operations.add("GET", f"{_QUEUE}/next", *SEE)
async def next_events(call: Call, queue: Name, query: Peek) -> NextEvents:
    """Show what a queue would deliver next, without leasing it: due retries first, then fresh events.

    The events come in the order of the log with the beginning of their payloads. `more`: it stopped before
    the end of the log.
    """
    return await call.broker.next_events(queue, query.max, query.look)


@operations.add("POST", "/v1/queues", OPERATE, problems=(410,))
async def create_queue(call: Call, body: CreateQueue) -> Created:
    """Create a queue for these topics. Creating it again with the same settings has no effect."""
    given = audited(body, "name", "patterns", "stream", "starting")
    starting = None if body.starting is None else await point(call.broker, body.stream, body.starting)
    with taken_elsewhere():
        async with call.changing() as change:
            made = await call.broker.create_queue(
                body.name, body.patterns, stream=body.stream, starting=starting, **given, conn=change.conn
            )
            if made:
                await change.record("create_queue", body.name, **audited(body, "name"))
    return Created(made)


@operations.add("PATCH", _QUEUE, OPERATE)
async def alter_queue(call: Call, queue: Name, body: AlterQueue) -> None:
    """Change a queue's settings; omitted ones stay."""
    given = {name: value for name, value in audited(body).items() if value is not None}
    if not given:
        raise invalid("nothing to change: no setting was given")
    async with call.changing() as change:
        await call.broker.alter_queue(queue, **given, conn=change.conn)
        await change.record("alter_queue", queue, **given)


@operations.add("POST", f"{_QUEUE}/bind", OPERATE)
async def bind(call: Call, queue: Name, body: Bind) -> None:
    """Replace a queue's patterns, and its filter if one is given, from its current position on."""
    async with call.changing() as change:
        await call.broker.bind(queue, **audited(body), conn=change.conn)
        await change.record("bind", queue, **audited(body))


@operations.add("DELETE", _QUEUE, OPERATE)
async def drop_queue(call: Call, queue: Name) -> Dropped:
    """Drop a queue with its leases, retries and dead letters. The events stay in the log."""
    async with call.changing() as change:
        dropped = await call.broker.drop_queue(queue, conn=change.conn)
        if dropped:
            await change.record("drop_queue", queue)
    return Dropped(dropped)


@operations.add("POST", f"{_QUEUE}/pause", CONSUME)
async def pause(call: Call, queue: Name, body: Pause) -> None:
    """Pause delivery. Open leases can still be settled."""
    async with call.changing() as change:
        await call.broker.pause(queue, body.reason, conn=change.conn)
        await change.record("pause", queue, reason=body.reason)


@operations.add("POST", f"{_QUEUE}/resume", CONSUME)
async def resume(call: Call, queue: Name, body: Nothing) -> None:
    """Resume delivery."""
    async with call.changing() as change:
        await call.broker.resume(queue, conn=change.conn)
        await change.record("resume", queue)


@operations.add("POST", f"{_QUEUE}/seek", OPERATE, problems=(410,))
async def seek(call: Call, queue: Name, body: Seek) -> None:
    """Move a queue to a point in its stream. Drops leases and retries; keeps dead letters."""
    to = await point(call.broker, await call.broker.stream_of(queue), body.to)
    with taken_elsewhere():
        async with call.changing() as change:
            await call.broker.seek(queue, to, conn=change.conn)
            await change.record("seek", queue, to=str(to))


@operations.add("POST", f"{_QUEUE}/purge", OPERATE)
async def purge(call: Call, queue: Name, body: Nothing) -> None:
    """Discard all waiting events, retries and leases. Dead letters stay."""
    async with call.changing() as change:
        await call.broker.purge(queue, conn=change.conn)
        await change.record("purge", queue)


async def _standing(call: Call, queue: str) -> QueueStatus:
    for one in await call.broker.queue_status():
        if one.queue == queue:
            return one
    raise QueueNotFound(f"queue '{queue}' does not exist")


async def _settings(call: Call, queue: str) -> dict[str, Any]:
    ((found,),) = await rows(call.broker, "select pgmb.queue_settings(%s)::text", (queue,))
    return msgspec.json.decode(found, type=dict[str, Any])
