"""Settle the events of a lease in progress: failures first, then successes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import AsyncLease
from pgmb._core import loggers
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS, AsyncDeadline
from pgmb.app.progress import Failure, LeaseProgress
from pgmb.errors import LeaseLost, PgmbError, translated

logger = loggers.logger("pgmb.app")

# By the database's clock: this machine's may differ.
_EXTEND = "select extract(epoch from pgmb.extend(%s) - clock_timestamp())::float8"
FIRST_PAUSE_SECONDS = 0.1
_FIRST_RELEASE_SECONDS = 1.0
"""How long an event that this process cannot handle waits at least."""
DATABASE_ERRORS = (psycopg.Error, PoolTimeout, PgmbError, OSError)
"""What a restart of the server, a lost connection or a change of rights looks like from here."""


async def extend(broker: AsyncBroker, lease: AsyncLease) -> float:
    """Extend a lease by its queue's own time. Returns the seconds that it has left then."""
    async with broker.own_connection() as conn:
        with translated():
            ((left,),) = await (await conn.execute(_EXTEND, [lease.id])).fetchall()
    return float(left)


async def settle(
    progress: LeaseProgress, deadline: AsyncDeadline, running: Iterable[int] = ()
) -> AsyncLease | None:
    """Settle a lease in progress, except for running events. Returns the lease if all of the rest succeeded.

    Acking it is left to the caller, who may do it together with the next receive.
    """
    if progress.lost:
        return None
    if progress.untroubled:
        return progress.lease
    lease, running = progress.lease, list(running)
    steps: list[tuple[Callable[[list[int] | None], Awaitable[object]], list[int]]] = [
        (partial(fail, lease, failure), seqs) for failure, seqs in _failures(progress).items()
    ]
    back = [seq for seq in progress.given_back if seq not in progress.settled and seq not in progress.taken]
    if back:
        steps.append((lease.release, back))
    succeeded = progress.succeeded(running)
    # Where a handler raised after it had settled an event itself, failing it does nothing or is right.
    unknown = progress.taken - progress.failed.keys()
    at_an_end = not (running or progress.pending or unknown)
    for number, (call, seqs) in enumerate(steps, 1):
        # The last step for all that is left also ends the lease.
        rest = at_an_end and not succeeded and not progress.behind and number == len(steps)
        if not await _persist(progress, deadline, partial(call, None if rest else seqs)):
            return None
        progress.settled.update(seqs)
    if not succeeded:
        if at_an_end and progress.behind:
            await end_divided(lease)
        return None
    if at_an_end:
        # Whatever else the lease held is settled: ending it as a whole is the cheapest.
        return lease
    if await _persist(progress, deadline, partial(lease.ack, succeeded)):
        progress.settled.update(succeeded)
    return None


async def end_divided(lease: AsyncLease) -> None:
    """End a lease whose events are all settled, one by one. One of retried events has ended with them."""
    with contextlib.suppress(LeaseLost, *DATABASE_ERRORS):
        await lease.ack()


async def judge_unfit(progress: LeaseProgress, run_other_code: Callable[[str], Awaitable[bool]]) -> None:
    """Release payloads that do not fit, instead of burying them, while workers run other code.

    Until none is left to be judged: while this waits for the database, handlers go on.
    """
    while unfit := [
        seq for seq, failure in progress.failed.items() if failure.final and failure.unhandled_for
    ]:
        try:
            released = await run_other_code(progress.lease.queue)
        except DATABASE_ERRORS as error:
            released = True
            logger.warning(
                "queue %s: cannot ask for other workers: %s", progress.lease.queue, str(error).strip()
            )
        for seq in unfit:
            judged = {"final": False} if released else {"unhandled_for": 0.0}
            progress.failed[seq] = progress.failed[seq]._replace(**judged)


def _failures(progress: LeaseProgress) -> dict[Failure, list[int]]:
    """What failed alike is settled by one statement."""
    alike: dict[Failure, list[int]] = {}
    for seq, failure in progress.failed.items():
        if seq not in progress.settled:
            alike.setdefault(failure, []).append(seq)
    return alike


async def ack(progress: LeaseProgress, deadline: AsyncDeadline) -> None:
    """End a lease as a whole."""
    await _persist(progress, deadline, progress.lease.ack)


async def fail(lease: AsyncLease, failure: Failure, seqs: list[int] | None) -> None:
    """Settle events that failed alike; None: all that are left."""
    if failure.unhandled_for is not None:
        # Not by bury() even where it is final: of an ordered queue, what follows in the lease goes back.
        await lease.release(seqs, _FIRST_RELEASE_SECONDS, failure.error, failure.unhandled_for)
    elif failure.final:
        await lease.bury(seqs, failure.error, failure.detail)
    else:
        together = None if failure.together is None else True
        await lease.retry(seqs, failure.after, failure.error, together, failure.detail)


async def _persist(
    progress: LeaseProgress, deadline: AsyncDeadline, call: Callable[[], Awaitable[object]]
) -> bool:
    """Until it is done, or the lease is lost (False): there is nothing better to do than to try again."""
    pause = FIRST_PAUSE_SECONDS
    while not progress.lost:
        try:
            with deadline.enforced():
                await call()
            return True
        except LeaseLost as error:
            lose(progress, error)
        except DATABASE_ERRORS as error:
            logger.warning(
                "queue %s: cannot settle: %s; retrying in %.1f s",
                progress.lease.queue,
                str(error).strip(),
                pause,
            )
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)
    return False


def lose(progress: LeaseProgress, error: LeaseLost) -> None:
    """Another consumer has the lease: nothing of it can be settled, and no more of its events start."""
    progress.lost = True
    progress.pending.clear()
    logger.warning(
        "queue %s: %s; what was not settled of its %s events is delivered again",
        progress.lease.queue,
        error,
        len(progress.lease.events),
    )
