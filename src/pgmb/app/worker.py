"""A worker: one of a queue's several tasks that call handlers. It takes events from the lease at hand.

A task an event, a timeout an event or a context manager an event would each cost more than receiving it. So
workers live as long as their consumer, note only what they are at, and a watchdog looks at that now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, cast

from pgmb.app.handler import Handler
from pgmb.app.outcome import Reject, Retry, Unfit, Unhandled, describe, own_traceback
from pgmb.app.progress import Failure, LeaseProgress
from pgmb.app.routing import Route, Routes, late
from pgmb.types import Event, live

logger = logging.getLogger("pgmb.app")

# Handlers that never wait would keep the event loop from running anything else.
_YIELD_EVERY_SECONDS = 0.01
# Reading the clock after each event would cost a tenth of the throughput.
_EVENTS_PER_CLOCK_READ = range(8)
_SURVIVORS_KEPT = 1000


class Assignments:
    """Shared by a consumer and its workers: the lease at hand, the workers without work, and a signal."""

    def __init__(self) -> None:
        self.current: LeaseProgress | None = None
        self.changed = asyncio.Event()
        """Set when a worker is idle, or a lease is finished or was handed over."""
        self._idle: deque[asyncio.Future[LeaseProgress]] = deque()
        self._survived: dict[int, int] = {}

    @property
    def wanted(self) -> bool:
        """Whether a worker is idle and the lease at hand has nothing left for it."""
        return bool(self._idle) and (self.current is None or not self.current.pending)

    def assign(self, progress: LeaseProgress) -> None:
        self.current = progress
        self.wake_next(progress)

    def wait(self) -> asyncio.Future[LeaseProgress]:
        """Where an idle worker waits for the next lease."""
        future: asyncio.Future[LeaseProgress] = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        self.changed.set()
        return future

    def wake_next(self, progress: LeaseProgress) -> None:
        """Wake one more worker. Each wakes the next, so a worker that never waits handles the lease alone."""
        while progress.pending and self._idle:
            future = self._idle.popleft()
            if not future.done():
                future.set_result(progress)
                return

    def note_survived(self, event: Event) -> None:
        """Note that an attempt failed here without ending the process."""
        self._survived[event.seq] = event.attempt
        if len(self._survived) > _SURVIVORS_KEPT:
            del self._survived[next(iter(self._survived))]

    def survived_last(self, event: Event) -> bool:
        """Whether the attempt before this one failed here."""
        return self._survived.get(event.seq) == event.attempt - 1


class Worker:
    __slots__ = (
        "_assignments",
        "_limit_hit",
        "_max_attempts",
        "_routes",
        "_seen",
        "_since",
        "progress",
        "running",
        "task",
    )

    def __init__(self, assignments: Assignments, routes: Routes, max_attempts: int) -> None:
        self._assignments = assignments
        self._routes = routes
        self._max_attempts = max_attempts
        self._limit_hit: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.progress: LeaseProgress | None = None
        self.running: Event | Sequence[Event] | None = None
        self._seen: object = None
        self._since = 0.0

    async def run(self) -> None:
        assignments = self._assignments
        while True:
            progress = assignments.current
            if progress is None or not progress.pending:
                progress = await assignments.wait()
                if not progress.pending:
                    continue
            if self._routes.batch is not None:
                work = self._batches
            elif isinstance(progress.pending[0], list):
                work = self._chains
            else:
                work = self._events
            self.progress = progress
            progress.working += 1
            assignments.wake_next(progress)
            try:
                await work(progress)
            finally:
                progress.working -= 1
                self.progress = self.running = None
            assignments.changed.set()

    async def _events(self, progress: LeaseProgress) -> None:
        routes, pending = self._routes, cast("deque[Event]", progress.pending)
        take = pending.popleft
        breathe = monotonic() + _YIELD_EVERY_SECONDS
        while pending:
            for _ in _EVENTS_PER_CLOCK_READ:
                if not pending:
                    break
                self.running = event = take()
                try:
                    prepare, call = routes[event.topic]
                    await call(prepare(event, progress))
                except BaseException as error:
                    self._failed(progress, event, error)
            if monotonic() > breathe:
                await asyncio.sleep(0)
                breathe = monotonic() + _YIELD_EVERY_SECONDS

    async def _chains(self, progress: LeaseProgress) -> None:
        """Lists of events that must not overtake each other: after a failure the rest is left alone."""
        routes = self._routes
        breathe = monotonic() + _YIELD_EVERY_SECONDS
        while progress.pending:
            chain = cast("list[Event]", progress.pending.popleft())
            for position, event in enumerate(chain):
                self.running = chain[position:]
                try:
                    prepare, call = routes[event.topic]
                    await call(prepare(event, progress))
                except BaseException as error:
                    rest = [later.seq for later in chain[position + 1 :]]
                    failure = self._failed(progress, event, error, rest)
                    if not failure.final or failure.unhandled_for is not None:
                        progress.behind.update(rest)
                        break
                if progress.lost:
                    break
                if monotonic() > breathe:
                    await asyncio.sleep(0)
                    breathe = monotonic() + _YIELD_EVERY_SECONDS

    async def _batches(self, progress: LeaseProgress) -> None:
        route = cast("Route", self._routes.batch)
        size, (prepare, call) = route.handlers[0].batch or 1, route.way
        while progress.pending:
            arguments: list[Any] = []
            fitting: list[Event] = []
            for event in progress.next_batch(size):
                if event.seq in progress.behind:
                    continue
                try:
                    arguments.append(prepare(event, progress))
                    fitting.append(event)
                except Reject as error:
                    if self._failed(progress, event, error).unhandled_for is not None:
                        progress.hold_back_behind(event)
            if not fitting:
                continue
            self.running = fitting
            try:
                await call(arguments)
            except BaseException as error:
                self._failed_batch(progress, fitting, error)
            await asyncio.sleep(0)

    def refuse(self, progress: LeaseProgress, error: BaseException) -> None:
        """Fail all events of a lease that could not be split into sets."""
        refused = [event for event in live(progress.lease.events) if progress.is_open(event)]
        self._failed_batch(progress, refused, error)

    def enforce(self, now: float) -> None:
        """Called by the watchdog: break off what runs for too long."""
        running, task = self.running, self.task
        if running is not self._seen:
            self._seen, self._since = running, now
            if self._limit_hit is not None and task is not None:
                # It was told to end, went on instead and is done.
                self._limit_hit = None
                task.uncancel()
        elif running is not None and task is not None:
            first = running if isinstance(running, Event) else running[0]
            timeout = self._routes.details(first.topic).timeout
            if timeout is not None and now - self._since >= timeout:
                self._limit_hit = timeout
                task.cancel()

    def running_seqs(self) -> list[int]:
        if self.running is None:
            return []
        if isinstance(self.running, Event):
            return [self.running.seq]
        return [event.seq for event in self.running]

    def _failed(
        self, progress: LeaseProgress, event: Event, error: BaseException, rest: Sequence[int] = ()
    ) -> Failure:
        try:
            error = self._explained(error)
        except BaseException:
            progress.given_back.update((event.seq, *rest))
            raise
        failure = progress.failed[event.seq] = self._routes.failure(progress, event, error)
        self._assignments.note_survived(event)
        if not isinstance(error, Unhandled):
            handler = self._routes.blamed(progress, event)
            self._log(f"{event.id}, {event.topic}, attempt {event.attempt}", event.attempt, handler, error)
        return failure

    def _failed_batch(self, progress: LeaseProgress, batch: list[Event], error: BaseException) -> None:
        try:
            error = self._explained(error)
        except BaseException:
            progress.given_back.update(event.seq for event in batch)
            raise
        handler = self._routes.handlers[0]
        for seq, failure in handler.failures(batch, error).items():
            # What the handler said of single events stands.
            progress.failed.setdefault(seq, failure)
        if len(batch) == 1:
            self._assignments.note_survived(batch[0])
        self._log(f"{len(batch)} events from {batch[0].id}", batch[0].attempt, handler, error)

    def _explained(self, error: BaseException) -> BaseException:
        """The error as the handler's own; raises it if it is not: the worker itself is told to end."""
        if isinstance(error, asyncio.CancelledError) and self.task is not None:
            limit, self._limit_hit = self._limit_hit, None
            if limit is not None:
                self.task.uncancel()
                return late(limit)
            if self.task.cancelling():
                raise error
        elif isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            raise error
        return error

    def _log(self, what: str, attempt: int, handler: Handler | None, error: BaseException) -> None:
        queue, name = self._routes.queue, handler.name if handler else "no handler"
        if isinstance(error, Retry):
            logger.info("queue %s: %s requested a retry: %s (%s)", queue, name, describe(error), what)
        elif isinstance(error, Unfit):
            logger.warning("queue %s: %s: %s (%s)", queue, name, describe(error), what)
        elif isinstance(error, Reject):
            logger.warning(
                "queue %s: %s rejected it, now a dead letter: %s (%s)", queue, name, describe(error), what
            )
        else:
            last = attempt >= self._max_attempts
            logger.log(
                logging.ERROR if last else logging.WARNING,
                "queue %s: %s failed: %s (%s%s)",
                queue,
                name,
                describe(error),
                what,
                ", the last attempt" if last else "",
                exc_info=(type(error), error, own_traceback(error)),
            )
