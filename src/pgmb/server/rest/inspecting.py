"""Operations that tell what became of an event, and who handles events."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from pgmb.server.access import Principal
from pgmb.server.problems import Problem
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import Given, Time
from pgmb.types import EventFate, Fate, WorkerStatus

operations = Operations("events")

_SEE: Final = (Need("inspect"), Need("consume", some=True), Need("read", some=True))


class Around(Given):
    around: Time | None = None
    """When it was published, about, if the publisher chose its id. Default: the time in a version 7 UUID."""


class Workers(msgspec.Struct):
    workers: list[WorkerStatus]


@operations.add("GET", "/v1/events/{event}", *_SEE)
async def event_fate(call: Call, event: UUID, query: Around) -> EventFate:
    """Show what became of an event: its state in every queue and at every endpoint.

    Keys without the scope inspect see the queues that they may consume, and the event if they may read its
    stream or one of these queues takes it.
    """
    found = _visible(await call.broker.event_fate(event, query.around), call.principal)
    if found is None:
        raise Problem(
            404,
            "not_found",
            "there is no such event",
            hint="For an id that the publisher chose, send `around`.",
        )
    return found


@operations.add("GET", "/v1/workers", Need("inspect"))
async def workers(call: Call) -> Workers:
    """List the processes that run handlers, also those that fell silent within the last hour."""
    return Workers(await call.broker.workers())


def _visible(found: EventFate, principal: Principal) -> EventFate | None:
    if found.found == "unknown":
        return None
    if principal.may("inspect"):
        return found
    consumers = [_without_session(one) for one in found.consumers if _consumes(principal, one)]
    taken = any(one.state not in ("not taken", "unknown") for one in consumers)
    if not taken and not (found.stream is not None and principal.may("read", found.stream)):
        return None
    return msgspec.structs.replace(found, consumers=consumers)


def _consumes(principal: Principal, fate: Fate) -> bool:
    return fate.kind == "queue" and principal.may("consume", fate.name)


def _without_session(fate: Fate) -> Fate:
    if fate.holder is None:
        return fate
    return msgspec.structs.replace(fate, holder=msgspec.structs.replace(fate.holder, role=None, address=None))
