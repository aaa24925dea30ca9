"""A consumer: receives a queue's events and has its workers handle them, several leases at once if need be.

The next lease is fetched as soon as a worker has nothing to do, while the last events of the former still
run; when all of it has succeeded, its ack travels with the next receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import psycopg

from pgmb._async.broker import AsyncBroker
from pgmb._async.receiving import AsyncLease
from pgmb._core import loggers
from pgmb._core.batch_limit import BatchLimit, is_lost_connection
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS, AsyncDeadline
from pgmb.app import settling
from pgmb.app.idle import IdlePoller
from pgmb.app.kept import kept
from pgmb.app.progress import LeaseProgress, LeaseSize
from pgmb.app.routing import Routes
from pgmb.app.watchdog import enforce_timeouts, extend_leases
from pgmb.app.worker import Assignments, Worker
from pgmb.errors import LeaseLost, QueueHeld
from pgmb.types import Event

logger = loggers.logger("pgmb.app")

# How long to wait for the end of a lease that was not full, so that its ack travels with the next receive.
_CALM_SECONDS = 0.005
# For the last statements, once every handler has ended.
_LAST_STATEMENTS_SECONDS = 5.0


class Consumer:
    def __init__(
        self,
        broker: AsyncBroker,
        idle: IdlePoller,
        routes: Routes,
        run_other_code: Callable[[str], Awaitable[bool]],
        *,
        concurrency: int,
        lease_for: float = 30.0,
        max_attempts: int = 10,
        ordered: bool = False,
        fair: bool = False,
    ) -> None:
        self.name = routes.queue
        self.routes = routes
        self.ordered = ordered
        self.max_attempts = max_attempts
        self.lease_for = lease_for
        self.in_progress: list[LeaseProgress] = []
        self._assignments = Assignments()
        self.workers = [Worker(self._assignments, routes, max_attempts) for _ in range(concurrency)]
        self._limit = BatchLimit()
        self.size = LeaseSize(concurrency, routes.handlers[0].batch, fair=fair)
        self._broker = broker
        self._run_other_code = run_other_code
        self._deadline = AsyncDeadline(f"queue {self.name}", broker.break_off)
        self._idle = idle
        self._asleep = False
        self._suspended: LeaseProgress | None = None
        self._carried: LeaseProgress | None = None
        self._stopping = asyncio.Event()
        self._calm_until = 0.0
        self._grace = 0.0

    async def run(self) -> None:
        """Until `stop`; then finish what is running and hand back the rest."""
        watches = {
            "extending leases": lambda: extend_leases(
                self._broker,
                self.name,
                self.in_progress,
                lambda: self.lease_for,
                self.sweep_every,
                self._assignments.changed,
                self._deadline,
            ),
            "enforcing timeouts": lambda: enforce_timeouts(self.routes.handlers, self.workers),
        }
        async with asyncio.TaskGroup() as group:
            for number, worker in enumerate(self.workers):
                worker.task = group.create_task(worker.run(), name=f"pgmb {self.name} {number}")
            watching = [
                group.create_task(kept(f"queue {self.name}: {what}", watch))
                for what, watch in watches.items()
            ]
            try:
                await kept(f"queue {self.name}: receiving", self._serve)
                await self._finish()
            finally:
                for worker in self.workers:
                    worker.end()
                for task in watching:
                    task.cancel()

    def stop(self, grace: float) -> None:
        """Receive no more, and end within `grace` seconds."""
        self._grace = grace
        self._stopping.set()
        self._assignments.changed.set()

    # -- called by the idle poller

    def hand(self, lease: AsyncLease, full: bool) -> bool:
        """Take over a lease that was received for this queue. False if it comes too late."""
        self._asleep = False
        if self._stopping.is_set():
            return False
        self._begin(lease, full)
        self._assignments.changed.set()
        return True

    def wake(self) -> None:
        """Look for itself again."""
        self._asleep = False
        self._assignments.changed.set()

    # -- the loop

    async def _serve(self) -> None:
        while not self._stopping.is_set():
            self._assignments.changed.clear()
            await self._settle()
            self._resume()
            if self._wants_more():
                await self._receive()
            elif self._carried is not None:
                await self._ack_carried()
            else:
                calm = self._calm_until - time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(calm if calm > 0 and not self._asleep else None):
                        await self._assignments.changed.wait()

    def _wants_more(self) -> bool:
        return (
            self._assignments.wanted
            and not self._asleep
            and not (self.in_progress and time.monotonic() < self._calm_until)
            and not any(progress.suspect for progress in self.in_progress)
            and not self._stopping.is_set()
        )

    async def _receive(self) -> None:
        pause = settling.FIRST_PAUSE_SECONDS
        held = False
        told = ""
        while not self._stopping.is_set():
            carried = self._carried
            wanted = self.size.next
            size = self._limit.of(wanted)
            try:
                with self._deadline.enforced():
                    lease = await self._broker.receive(
                        self.name, size, ack=None if carried is None else carried.lease
                    )
            except LeaseLost as error:
                if carried is not None:
                    settling.lose(carried, error)
                    self._carried = None
            except QueueHeld as error:
                # The receive waited for about a second. It works again when that transaction ends.
                if not held:
                    logger.warning("queue %s: cannot receive: %s; waiting", self.name, error)
                held = True
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
            except settling.DATABASE_ERRORS as error:
                text = str(error).strip()
                logger.log(
                    logging.DEBUG if text == told else logging.WARNING,
                    "queue %s: cannot receive: %s; retrying in %.1f s",
                    self.name,
                    text,
                    pause,
                )
                told = text
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                smaller = False
                if isinstance(error, psycopg.Error) and not is_lost_connection(error):
                    self._limit.failed(size, error)
                    await self._bury_unreadable(error)
                    smaller = size > 1
                pause = settling.FIRST_PAUSE_SECONDS if smaller else min(pause * 2, LONGEST_RETRY_SECONDS)
            else:
                if told:
                    logger.info("queue %s: receiving again", self.name)
                self._limit.succeeded(size, wanted)
                self._carried = None
                if lease:
                    self._begin(lease, full=len(lease.events) >= size)
                else:
                    self._asleep = True
                    self._idle.add(self)
                return

    async def _bury_unreadable(self, error: psycopg.Error) -> None:
        """Give up the next event when it could not be read in all of its attempts."""
        if self._limit.failures:
            with contextlib.suppress(*settling.DATABASE_ERRORS):
                number = await self._broker.bury_unreadable(
                    self.name, str(error).strip(), self._limit.failures
                )
                if number is not None:
                    self._limit.failures = 0
                    logger.error("queue %s: event %d cannot be read: now a dead letter", self.name, number)

    def _begin(self, lease: AsyncLease, full: bool) -> None:
        if not full:
            self._calm_until = time.monotonic() + _CALM_SECONDS
        suspect = len(lease.events) == 1 and self._is_suspect(lease.events[0])
        progress = LeaseProgress(lease, self.max_attempts, ordered=self.ordered, suspect=suspect)
        self.routes.refuse_unmatched(progress)
        try:
            self.routes.divide(progress)
        except BaseException as error:
            self.workers[0].refuse(progress, error)
        if progress.suspect and (self.in_progress or self._carried is not None):
            # It may take the process down with it: alone, then, and after the others are settled.
            self._suspended = progress
        else:
            self._assignments.assign(progress)
        self.in_progress.append(progress)

    def _is_suspect(self, event: Event) -> bool:
        """Whether an event that was leased alone may have crashed its previous consumer.

        One whose lease expired comes alone from its third attempt on, or in its last.
        """
        late = event.attempt > 2 or (event.attempt > 1 and event.attempt >= self.max_attempts)
        return late and not self._assignments.survived_last(event)

    def _resume(self) -> None:
        if self._suspended is not None and self.in_progress == [self._suspended] and self._carried is None:
            self._assignments.assign(self._suspended)
            self._suspended = None

    async def _settle(self) -> None:
        now = time.monotonic()
        for progress in self.in_progress[:]:
            await settling.judge_unfit(progress, self._run_other_code)
            if progress.finished:
                whole = await settling.settle(progress, self._deadline)
                self.in_progress.remove(progress)
                self.size.took(len(progress.lease.events), now - progress.began)
                if whole is None:
                    continue
                if self._carried is not None:
                    await self._ack_carried()
                self._carried = progress
            elif now - progress.swept > self.sweep_every and progress is not self._suspended:
                # What is done of a long lease is not put at risk by what is not.
                progress.swept = now
                await settling.settle(progress, self._deadline, self._running(progress))

    def _running(self, progress: LeaseProgress) -> list[int]:
        return [
            seq for worker in self.workers if worker.progress is progress for seq in worker.running_seqs()
        ]

    async def _ack_carried(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None:
            await settling.ack(carried, self._deadline)

    @property
    def sweep_every(self) -> float:
        return min(1.0, self.lease_for / 3)

    # -- the end

    async def _finish(self) -> None:
        self._idle.remove(self)
        self._suspended = None
        end = time.monotonic() + self._grace
        for progress in self.in_progress:
            progress.drop_pending()
            progress.swept = 0.0
        try:
            async with asyncio.timeout(self._grace + _LAST_STATEMENTS_SECONDS):
                while self.in_progress and (left := end - time.monotonic()) > 0:
                    self._assignments.changed.clear()
                    await self._settle()
                    if self.in_progress:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._assignments.changed.wait(), left)
                await self._end_workers()
                await self._settle()
                await self._ack_carried()
        except TimeoutError:
            logger.warning("queue %s: ended without settling everything", self.name)
            await self._end_workers()

    async def _end_workers(self) -> None:
        tasks = [worker.task for worker in self.workers if worker.task is not None]
        for worker in self.workers:
            worker.end()
        if tasks:
            # A handler that refuses to be cancelled is left behind.
            await asyncio.wait(tasks, timeout=_LAST_STATEMENTS_SECONDS / 2)
