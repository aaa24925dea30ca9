"""Operations that receive from a queue and settle events."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Final
from uuid import UUID

import msgspec
from msgspec import Meta

from pgmb.server.problems import invalid
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import (
    MOST_IDS,
    Counted,
    Duration,
    EventDocument,
    Given,
    Name,
    Number,
    NumberText,
    Text,
)

operations = Operations("receive")

CONSUME: Final = Need("consume", "queue")
_LEASE: Final = "/v1/queues/{queue}/leases/{lease}"
_LONGEST_WAIT: Final = 60


class Receive(Given):
    max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    wait: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_WAIT)] = 0
    """Seconds to wait for the first event."""
    lease_for: Duration | None = None


class Received(msgspec.Struct):
    """Leased events. The lease, by which they are settled, is null if there are none."""

    queue: str
    lease: UUID | None
    events: list[EventDocument]


class Seqs(Given):
    """Events of the lease, by default all unsettled ones."""

    seqs: Annotated[list[Number | NumberText], Meta(max_length=MOST_IDS)] | None = None

    @property
    def numbers(self) -> list[int] | None:
        return None if self.seqs is None else [int(seq) for seq in self.seqs]


class Retry(Seqs):
    after: Duration | None = None
    error: Text | None = None
    together: bool | None = None


class Bury(Seqs):
    error: Text | None = None


class Release(Seqs):
    after: Duration | None = None
    """How long the events wait, by default not at all."""
    error: Text | None = None
    bury_after: Duration | None = None
    """Events that are released again wait longer each time, and become dead letters after this time."""


class Extend(Given):
    lease_for: Duration | None = None


class Extended(msgspec.Struct):
    expires_at: datetime


@operations.add("POST", "/v1/queues/{queue}/receive", CONSUME)
async def receive(call: Call, queue: Name, body: Receive) -> Received:
    """Lease the next events of a queue. Events that are not settled in time are delivered again.

    With `wait`, the request waits up to that many seconds for events.
    """
    most = call.context.limits.events
    if body.max > most:
        raise invalid(f"a request may ask for at most {most} events")
    watching = partial(call.context.access.watching, call.principal)
    lease = await call.service.polls.receive(
        call.request, queue, body.max, body.wait, body.lease_for, watching, call.principal.key
    )
    events = [EventDocument.of(event) for event in lease.events]
    return Received(queue, lease.id if events else None, events)


@operations.add("POST", f"{_LEASE}/ack", CONSUME)
async def ack(call: Call, queue: Name, lease: UUID, body: Seqs) -> Counted:
    """Ack events of a lease. A repeated ack counts 0."""
    await call.service.leases.check(lease, queue)
    return Counted(await call.broker.ack(lease, body.numbers))


@operations.add("POST", f"{_LEASE}/retry", CONSUME)
async def retry(call: Call, queue: Name, lease: UUID, body: Retry) -> Counted:
    """Retry events of a lease, by default after the queue's backoff.

    Past the queue's max_attempts they become dead letters.
    """
    await call.service.leases.check(lease, queue)
    return Counted(await call.broker.retry(lease, body.numbers, body.after, body.error, body.together))


@operations.add("POST", f"{_LEASE}/bury", CONSUME)
async def bury(call: Call, queue: Name, lease: UUID, body: Bury) -> Counted:
    """Move events of a lease to the queue's dead letters."""
    await call.service.leases.check(lease, queue)
    return Counted(await call.broker.bury(lease, body.numbers, body.error))


@operations.add("POST", f"{_LEASE}/release", CONSUME)
async def release(call: Call, queue: Name, lease: UUID, body: Release) -> Counted:
    """Release events of a lease without counting the attempt: due at once, or `after` that time."""
    await call.service.leases.check(lease, queue)
    return Counted(await call.broker.release(lease, body.numbers, body.after, body.error, body.bury_after))


@operations.add("POST", f"{_LEASE}/extend", CONSUME)
async def extend(call: Call, queue: Name, lease: UUID, body: Extend) -> Extended:
    """Extend a lease from now, by default for the queue's lease time."""
    await call.service.leases.check(lease, queue)
    return Extended(await call.broker.extend(lease, body.lease_for))
