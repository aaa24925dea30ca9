"""Handle one lease, or a number of events of a queue, without a worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import AsyncLease
from pgmb.app import settling
from pgmb.app.declaring import Declarations, QueueSettings, QueueSpec
from pgmb.app.handler import Handler
from pgmb.app.outcome import Reject, Retry, Unfit, Unhandled, own_traceback
from pgmb.app.progress import Failure, LeaseProgress, extend_after
from pgmb.app.routing import Middleware, Route, Routes, late
from pgmb.app.threads import Threads
from pgmb.errors import LeaseLost
from pgmb.types import Event, live

logger = logging.getLogger("pgmb.app")


Outcome: TypeAlias = Literal["done", "retried", "released", "buried"]


class Handled(NamedTuple):
    """One delivery, and what came of it."""

    queue: str
    event: Event
    outcome: Outcome
    error: BaseException | None


async def handle_lease(
    routes: Routes,
    lease: AsyncLease,
    settings: QueueSettings,
    run_other_code: Callable[[str], Awaitable[bool]],
) -> list[Handled]:
    """Handle a lease of one event, or of a batch where the handler takes one."""
    progress = LeaseProgress(lease, ordered=settings.ordered)
    errors: dict[int, BaseException] = {**routes.refuse_unmatched(progress)}
    if routes.batch is None:
        progress.pending.clear()
        for event in live(lease.events):
            await _call_single(routes.details(event.topic), progress, event, errors)
    else:
        await _call_batches(routes, routes.batch, progress, errors)
    for event in lease.events:
        if event.seq in errors:
            failure = routes.failure(progress, event, errors[event.seq])
            # What the handler said of single events stands.
            progress.failed.setdefault(event.seq, failure)
    await settling.judge_unfit(progress, run_other_code)
    await _settle(progress)
    return [
        Handled(routes.queue, event, _outcome(progress, event, settings.max_attempts), errors.get(event.seq))
        for event in lease.events
    ]


def meant(error: BaseException) -> bool:
    """Whether it says how the event ends, and is no failure of a handler."""
    return type(error) in (Retry, Reject, Unhandled)


async def _call_single(
    route: Route, progress: LeaseProgress, event: Event, errors: dict[int, BaseException]
) -> None:
    prepare, _ = route.way
    try:
        await _call(route, prepare(event, progress))
    except Exception as error:
        errors[event.seq] = error


async def _call_batches(
    routes: Routes, route: Route, progress: LeaseProgress, errors: dict[int, BaseException]
) -> None:
    try:
        routes.divide(progress)
    except Exception as error:
        refused = [event for event in live(progress.lease.events) if progress.is_open(event)]
        _fail(route.handlers[0], progress, refused, error, errors)
    while progress.pending:
        await _call_batch(route, progress, progress.next_batch(routes.size), errors)


async def _call_batch(
    route: Route, progress: LeaseProgress, batch: list[Event], errors: dict[int, BaseException]
) -> None:
    prepare, _ = route.way
    arguments: list[Any] = []
    fitting: list[Event] = []
    for event in batch:
        if event.seq in progress.behind:
            continue
        try:
            arguments.append(prepare(event, progress))
            fitting.append(event)
        except Reject as error:
            errors[event.seq] = error
            if isinstance(error, Unfit):
                progress.hold_back_behind(event)
    if not fitting:
        return
    try:
        await _call(route, arguments)
    except Exception as error:
        _fail(route.handlers[0], progress, fitting, error, errors)


def _fail(
    handler: Handler,
    progress: LeaseProgress,
    batch: list[Event],
    error: Exception,
    errors: dict[int, BaseException],
) -> None:
    errors.update((event.seq, error) for event in batch)
    for seq, failure in handler.failures(batch, error).items():
        # What the handler said of single events stands.
        progress.failed.setdefault(seq, failure)


async def _call(route: Route, argument: Any) -> None:
    _, call = route.way
    limit = asyncio.timeout(route.timeout)
    try:
        async with limit:
            await call(argument)
    except TimeoutError:
        if route.timeout is not None and limit.expired():
            raise late(route.timeout) from None
        raise


async def _settle(progress: LeaseProgress) -> None:
    groups: dict[Failure | None, list[int]] = {}
    for seq, failure in progress.failed.items():
        groups.setdefault(failure, []).append(seq)
    if done := progress.succeeded():
        groups[None] = done
    for number, (ending, seqs) in enumerate(groups.items(), 1):
        # The last takes the whole rest, and with that ends the lease itself.
        part = seqs if number < len(groups) or progress.taken or progress.behind else None
        if ending is None:
            await progress.lease.ack(part)
        else:
            await settling.fail(progress.lease, ending, part)
    if progress.behind:
        await settling.end_divided(progress.lease)


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
            async with _kept(broker, lease, found.lease_for):
                try:
                    handled = await handle_lease(routes, lease, found, declarations.run_other_code)
                except LeaseLost as error:
                    logger.warning("queue %s: %s; its events are delivered again", queue, error)
                else:
                    _log(handled)
    finally:
        threads.close()
    return count


@contextlib.asynccontextmanager
async def _kept(broker: AsyncBroker, lease: AsyncLease, lease_for: float) -> AsyncGenerator[None]:
    """Prolong the lease for as long as this lasts."""

    async def keep() -> None:
        extended_for: float | None = None
        while True:
            await asyncio.sleep(extend_after(extended_for, lease_for))
            try:
                extended_for = await settling.extend(broker, lease)
            except LeaseLost:
                return
            except settling.DATABASE_ERRORS as error:
                logger.warning("queue %s: cannot extend the lease: %s", lease.queue, str(error).strip())

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def _log(handled: list[Handled]) -> None:
    for one in handled:
        if one.error is not None:
            logger.warning(
                "queue %s: %s: %s (%s, %s, attempt %s)",
                one.queue,
                one.outcome,
                one.error,
                one.event.id,
                one.event.topic,
                one.event.attempt,
                exc_info=(type(one.error), one.error, own_traceback(one.error)),
            )
