"""A worker: one of a queue's several tasks that call handlers. It takes events from the lease at hand.

A timeout an event or a context manager an event would each cost more than receiving it. So workers live as
long as their consumer, note only what they are at, and a watchdog looks at that now and then.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from sys import getrefcount
from time import monotonic
from typing import Any, cast
from weakref import getweakrefcount

from pgmb._core import loggers
from pgmb.app.handler import Handler
from pgmb.app.outcome import Late, Reject, Retry, Unfit, Unhandled, describe, own_traceback
from pgmb.app.progress import Failure, LeaseProgress
from pgmb.app.routing import Route, Routes
from pgmb.types import Event, live

logger = loggers.logger("pgmb.app")

# Handlers that never wait would keep the event loop from running anything else.
_YIELD_EVERY_SECONDS = 0.01
# Reading the clock after each event would cost a tenth of the throughput.
_EVENTS_PER_CLOCK_READ = range(8)
_SURVIVORS_KEPT = 1000
# An error that lasts would keep the event loop from running anything else.
_RESTART_SECONDS = 0.1


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


class _Employee(asyncio.Task[None]):
    """A task that notes whether anybody cancelled it or wanted to know of its end."""

    touched = False

    def cancel(self, msg: Any = None) -> bool:
        self.touched = True
        return super().cancel(msg)

    def add_done_callback(self, callback: Any, /, *, context: contextvars.Context | None = None) -> None:
        self.touched = True
        super().add_done_callback(callback, context=context)


class Worker:
    """Calls handlers in a task and a context of its own for each event, as far as anybody can tell.

    A new task for each event would cost more than receiving it. So the next event has the task of the one
    before, if that left no trace of it: nobody kept the task, or left a callback or a cancellation at it, and
    the context is what it was at the start. Else another task goes on.
    """

    __slots__ = (
        "_assignments",
        "_base",
        "_by_hand",
        "_context",
        "_employee",
        "_ending",
        "_limit_hit",
        "_max_attempts",
        "_raised",
        "_routes",
        "_seen",
        "_since",
        "errors",
        "progress",
        "running",
        "task",
    )

    def __init__(self, assignments: Assignments, routes: Routes, max_attempts: int) -> None:
        self._assignments = assignments
        self._routes = routes
        self._max_attempts = max_attempts
        self._base = self._context = contextvars.copy_context()
        self._employee: _Employee | None = None
        """The task that calls handlers."""
        self._raised: BaseException | None = None
        """What ended it."""
        self._limit_hit: float | None = None
        self._by_hand = self._ending = False
        self.errors: dict[int, BaseException] | None = None
        """Why events failed, where `handle` runs."""
        self.task: asyncio.Task[None] | None = None
        """The task of `run`."""
        self.progress: LeaseProgress | None = None
        self.running: Event | Sequence[Event] | None = None
        self._seen: object = None
        self._since = 0.0

    async def run(self) -> None:
        """Until `end`, whatever is raised."""
        while not self._ending:
            await self._employ(self._serve)
            error = self._raised
            if error is not None and not self._ending:
                logger.error(
                    "queue %s: a worker ended unexpectedly: %s; starting it again",
                    self._routes.queue,
                    describe(error),
                    exc_info=(type(error), error, error.__traceback__),
                )
                await asyncio.sleep(_RESTART_SECONDS)

    def end(self) -> None:
        """Break off what runs, and end. A cancellation by anybody else ends nothing."""
        self._ending = True
        if self._employee is not None:
            self._employee.cancel()

    async def handle(self, progress: LeaseProgress, errors: dict[int, BaseException]) -> None:
        """Handle a lease for the caller, whose task may be cancelled. Notes why events failed."""
        self._by_hand, self.errors = True, errors
        while progress.pending:
            await self._employ(partial(self._work, progress))
            if self._raised is not None:
                raise self._raised

    async def _employ(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have a new task do the work, and wait for its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._context, self._raised = self._base.copy(), None
        self._employee = _Employee(
            self._guarded(work, ended), loop=loop, name="pgmb handler", context=self._context
        )
        while not ended.done():
            try:
                # Not the task itself: a callback at it would hide those of handlers.
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                if self._by_hand:
                    self.end()

    async def _guarded(
        self, work: Callable[[], Coroutine[Any, Any, None]], ended: asyncio.Future[None]
    ) -> None:
        # A task that raises SystemExit or KeyboardInterrupt ends the event loop.
        try:
            await work()
        except BaseException as error:
            self._raised = error
        finally:
            if not ended.done():
                ended.set_result(None)

    async def _serve(self) -> None:
        """Until an event leaves a trace."""
        assignments = self._assignments
        trace = self._trace()
        while not trace():
            progress = assignments.current
            if progress is None or not progress.pending:
                progress = await assignments.wait()
                if not progress.pending:
                    continue
            assignments.wake_next(progress)
            await self._work(progress)
            assignments.changed.set()

    async def _work(self, progress: LeaseProgress) -> None:
        """Handle the events of a lease, until one leaves a trace."""
        if self._routes.batch is not None:
            work = self._batches
        elif isinstance(progress.pending[0], list):
            work = self._chains
        else:
            work = self._events
        self.progress = progress
        progress.working += 1
        try:
            await work(progress)
            if self._ending:
                raise asyncio.CancelledError
        except BaseException:
            # Nobody knows whether it was handled.
            progress.given_back.update(self.running_seqs())
            raise
        finally:
            progress.working -= 1
            self.progress = self.running = None

    def _trace(self) -> Callable[[], bool]:
        """What tells whether an event left a trace of its task or in its context."""
        task: Any = asyncio.current_task()
        context, base = self._context, self._base
        weak = getweakrefcount(task)

        def trace() -> bool:
            try:
                return (
                    getrefcount(task) != references
                    or getweakrefcount(task) != weak
                    or task.touched
                    or context != base
                )
            except Exception:
                # Values are compared where variables were set.
                return True

        references = getrefcount(task)
        return trace

    async def _events(self, progress: LeaseProgress) -> None:
        routes, pending = self._routes, cast("deque[Event]", progress.pending)
        # `_trace`, written out: a call of it would cost a tenth of what an event does.
        task: Any = asyncio.current_task()
        context, base, weak = self._context, self._base, getweakrefcount(task)
        references = getrefcount(task)
        take = pending.popleft
        breathe = monotonic() + _YIELD_EVERY_SECONDS
        while pending and not self._ending:
            for _ in _EVENTS_PER_CLOCK_READ:
                if not pending:
                    break
                self.running = event = take()
                try:
                    prepare, call = routes[event.topic]
                    await call(prepare(event, progress))
                except BaseException as error:
                    self._failed(progress, event, self._explained(error))
                try:
                    if (
                        getrefcount(task) != references
                        or getweakrefcount(task) != weak
                        or task.touched
                        or context != base
                    ):
                        return
                except Exception:
                    return
            if monotonic() > breathe:
                self.running = None
                await asyncio.sleep(0)
                breathe = monotonic() + _YIELD_EVERY_SECONDS

    async def _chains(self, progress: LeaseProgress) -> None:
        """Lists of events that must not overtake each other: after a failure the rest is left alone."""
        routes, pending, trace = self._routes, cast("deque[list[Event]]", progress.pending), self._trace()
        breathe = monotonic() + _YIELD_EVERY_SECONDS
        while pending and not self._ending:
            self.running = chain = pending.popleft()
            event, rest = chain[0], chain[1:]
            try:
                prepare, call = routes[event.topic]
                await call(prepare(event, progress))
            except BaseException as error:
                failure = self._failed(progress, event, self._explained(error))
                if not failure.final or failure.unhandled_for is not None:
                    progress.behind.update(later.seq for later in rest)
                    rest = []
            if rest and not progress.lost:
                pending.appendleft(rest)
            self.running = None
            if trace():
                return
            if monotonic() > breathe:
                await asyncio.sleep(0)
                breathe = monotonic() + _YIELD_EVERY_SECONDS

    async def _batches(self, progress: LeaseProgress) -> None:
        route, trace = cast("Route", self._routes.batch), self._trace()
        size, (prepare, call) = route.handlers[0].batch or 1, route.way
        while progress.pending and not self._ending:
            arguments: list[Any] = []
            fitting: list[Event] = []
            for event in progress.next_batch(size):
                if event.seq in progress.behind:
                    continue
                try:
                    arguments.append(prepare(event, progress))
                    fitting.append(event)
                except BaseException as error:
                    if self._failed(progress, event, error).unhandled_for is not None:
                        progress.hold_back_behind(event)
            if not fitting:
                continue
            self.running = fitting
            try:
                await call(arguments)
            except BaseException as error:
                self._failed_batch(progress, fitting, self._explained(error))
            self.running = None
            if trace():
                return
            await asyncio.sleep(0)

    def _explained(self, error: BaseException) -> BaseException:
        """The error as the handler's own; raises it if it ends the worker."""
        limit, self._limit_hit = self._limit_hit, None
        if isinstance(error, asyncio.CancelledError):
            if limit is not None:
                return Late(limit)
            if self._ending:
                raise error
        return error

    def refuse(self, progress: LeaseProgress, error: BaseException) -> None:
        """Fail all events of a lease that could not be split into sets."""
        refused = [event for event in live(progress.lease.events) if progress.is_open(event)]
        self._failed_batch(progress, refused, error)

    def enforce(self, now: float) -> None:
        """Called by the watchdog: break off what runs for too long."""
        running = self.running
        if running is not self._seen:
            self._seen, self._since, self._limit_hit = running, now, None
        elif running is not None and self._employee is not None and self._limit_hit is None:
            first = running if isinstance(running, Event) else running[0]
            timeout = self._routes.details(first.topic).timeout
            if timeout is not None and now - self._since >= timeout:
                self._limit_hit = timeout
                self._employee.cancel()

    def running_seqs(self) -> list[int]:
        if self.running is None:
            return []
        if isinstance(self.running, Event):
            return [self.running.seq]
        return [event.seq for event in self.running]

    def _failed(self, progress: LeaseProgress, event: Event, error: BaseException) -> Failure:
        if self.errors is not None:
            self.errors[event.seq] = error
        failure = progress.failed[event.seq] = self._routes.failure(progress, event, error)
        self._assignments.note_survived(event)
        if not isinstance(error, Unhandled):
            handler = self._routes.blamed(progress, event)
            self._log(f"{event.id}, {event.topic}, attempt {event.attempt}", event.attempt, handler, error)
        return failure

    def _failed_batch(self, progress: LeaseProgress, batch: list[Event], error: BaseException) -> None:
        if self.errors is not None:
            self.errors.update((event.seq, error) for event in batch)
        handler = self._routes.handlers[0]
        for seq, failure in handler.failures(batch, error).items():
            # What the handler said of single events stands.
            progress.failed.setdefault(seq, failure)
        if len(batch) == 1:
            self._assignments.note_survived(batch[0])
        self._log(f"{len(batch)} events from {batch[0].id}", batch[0].attempt, handler, error)

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
