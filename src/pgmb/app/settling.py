"""Settling what a hold has come to: failures first, then what succeeded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.receiving import AsyncLease
from pgmb.app.hold import Failure, Hold
from pgmb.errors import LeaseLost, PgmbError

logger = logging.getLogger("pgmb.app")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
TROUBLE = (psycopg.Error, PoolTimeout, PgmbError, OSError)
"""What a restart of the server, a lost connection or a change of rights looks like from here."""


async def settle(hold: Hold, running: Iterable[int] = ()) -> AsyncLease | None:
    """Settle all of a hold but what is running, and a success of the whole rest: that lease is returned.

    Acking it is left to the caller, who may do it together with the next receive.
    """
    if hold.lost:
        return None
    if hold.untroubled:
        return hold.lease
    lease, running = hold.lease, list(running)
    steps: list[tuple[Callable[[list[int] | None], Awaitable[object]], list[int]]] = [
        (partial(_fail, lease, failure), seqs) for failure, seqs in _failures(hold).items()
    ]
    back = [seq for seq in hold.given_back if seq not in hold.settled and seq not in hold.taken]
    if back:
        steps.append((lease.release, back))
    succeeded = hold.succeeded(running)
    # Where a handler raised after it had settled an event itself, failing it does nothing or is right.
    unknown = hold.taken - hold.failed.keys()
    at_an_end = not (running or hold.pending or unknown)
    for number, (call, seqs) in enumerate(steps, 1):
        # The last step for all that is left also ends the lease.
        rest = at_an_end and not succeeded and not hold.behind and number == len(steps)
        if not await _persist(hold, partial(call, None if rest else seqs)):
            return None
        hold.settled.update(seqs)
    if not succeeded:
        if at_an_end and hold.behind:
            # All of it is settled, one by one; a lease of retried events has ended with them.
            with contextlib.suppress(LeaseLost, *TROUBLE):
                await lease.ack()
        return None
    if at_an_end:
        # Whatever else the lease held is settled: ending it as a whole is the cheapest.
        return lease
    if await _persist(hold, partial(lease.ack, succeeded)):
        hold.settled.update(succeeded)
    return None


def _failures(hold: Hold) -> dict[Failure, list[int]]:
    """What failed alike is settled by one statement."""
    alike: dict[Failure, list[int]] = {}
    for seq, failure in hold.failed.items():
        if seq not in hold.settled:
            alike.setdefault(failure, []).append(seq)
    return alike


async def ack(hold: Hold) -> None:
    """End a lease as a whole."""
    await _persist(hold, hold.lease.ack)


async def _fail(lease: AsyncLease, failure: Failure, seqs: list[int] | None) -> None:
    if failure.final:
        await lease.bury(seqs, failure.error)
    else:
        together = None if failure.together is None else True
        await lease.retry(seqs, failure.after, failure.error, together)


async def _persist(hold: Hold, call: Callable[[], Awaitable[object]]) -> bool:
    """Until it is done, or the lease is lost (False): there is nothing better to do than to try again."""
    pause = FIRST_PAUSE
    while not hold.lost:
        try:
            await call()
            return True
        except LeaseLost as error:
            lose(hold, error)
        except TROUBLE as error:
            logger.warning(
                "queue %s: cannot settle: %s; again in %.1f s", hold.lease.queue, str(error).strip(), pause
            )
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
    return False


def lose(hold: Hold, error: LeaseLost) -> None:
    """The lease is another's now: nothing of it can be settled, and what has not begun shall not begin."""
    hold.lost = True
    hold.pending.clear()
    logger.warning(
        "queue %s: %s; what was not settled of its %s events is delivered again",
        hold.lease.queue,
        error,
        len(hold.lease.events),
    )
