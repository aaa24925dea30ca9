"""Handle one lease, or a number of events of a queue, without a consumer around the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import AsyncLease
from pgmb._core.concurrency import AsyncDeadline
from pgmb.app import settling
from pgmb.app.declaring import Declarations, QueueSettings, QueueSpec
from pgmb.app.outcome import Reject, Retry, Unhandled
from pgmb.app.progress import LeaseProgress
from pgmb.app.routing import Middleware, Routes
from pgmb.app.threads import Threads
from pgmb.app.watchdog import enforce_timeouts, extend_leases
from pgmb.app.worker import Assignments, Worker
from pgmb.types import Event

# How often to look whether the lease is to be extended.
_EXTEND_EVERY_SECONDS: Final = 1.0

Outcome: TypeAlias = Literal["done", "retried", "released", "buried"]


class Handled(NamedTuple):
    """One delivery, and what came of it."""

    queue: str
    event: Event
    outcome: Outcome
    error: BaseException | None


async def handle_lease(
    broker: AsyncBroker,
    routes: Routes,
    lease: AsyncLease,
    settings: QueueSettings,
    run_other_code: Callable[[str], Awaitable[bool]],
) -> list[Handled]:
    """Handle one lease as a worker does: the same calls, timeouts, extension and settling."""
    progress = LeaseProgress(lease, settings.max_attempts, ordered=settings.ordered)
    worker = Worker(Assignments(), routes, settings.max_attempts)
    errors: dict[int, BaseException] = {**routes.refuse_unmatched(progress)}
    deadline = AsyncDeadline(f"queue {routes.queue}", broker.break_off)
    watches = [
        asyncio.create_task(watch)
        for watch in (
            enforce_timeouts(routes.handlers, [worker]),
            extend_leases(
                broker,
                routes.queue,
                [progress],
                lambda: settings.lease_for,
                min(_EXTEND_EVERY_SECONDS, settings.lease_for / 3),
                asyncio.Event(),
                deadline,
            ),
        )
    ]
    try:
        worker.errors = errors
        try:
            routes.divide(progress)
        except BaseException as error:
            worker.refuse(progress, error)
        await worker.handle(progress, errors)
        await settling.judge_unfit(progress, run_other_code)
        if await settling.settle(progress, deadline) is not None:
            await settling.ack(progress, deadline)
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.wait(watches)
    return [
        Handled(routes.queue, event, _outcome(progress, event, settings.max_attempts), errors.get(event.seq))
        for event in lease.events
    ]


def meant(error: BaseException) -> bool:
    """Whether it says how the event ends, and is no failure of a handler."""
    return type(error) in (Retry, Reject, Unhandled)


def _outcome(progress: LeaseProgress, event: Event, max_attempts: int) -> Outcome:
    failure = progress.failed.get(event.seq)
    if event.seq in progress.behind:
        return "released"
    if failure is None:
        return "done"
    if failure.unhandled_for is not None and not failure.final:
        return "released"
    return "buried" if failure.final or event.attempt >= max_attempts else "retried"


async def handle_next(
    broker: AsyncBroker, spec: QueueSpec, middlewares: Sequence[Middleware], limit: int, unhandled_for: float
) -> int:
    """Call a queue's handlers for its next events. Returns how many there were."""
    queue = spec.name
    declarations = Declarations(broker)
    found = (await declarations.declare([spec]))[queue]
    threads, count = Threads("pgmb handler"), 0
    routes = Routes(queue, spec.handlers, middlewares, threads, unhandled_for)
    try:
        while count < limit:
            # One event a lease, unless the handler takes more: each is settled as it was handled, in order.
            lease = await broker.receive(queue, min(limit - count, routes.size))
            if not lease:
                break
            count += len(lease)
            await handle_lease(broker, routes, lease, found, declarations.run_other_code)
    finally:
        threads.close()
    return count
