"""The background publisher: collects events and publishes them in batches, beside the caller's work."""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, cast
from uuid import UUID

from psycopg import AsyncConnection

from pgmb._async.calls import Pool
from pgmb._async.publishing import AsyncPublishing
from pgmb._core import durations, loggers, pending, statements
from pgmb._core.concurrency import AsyncBackground, AsyncCondition, AsyncLock
from pgmb._core.connecting import aconnect
from pgmb._core.pending import MARKED_FOR, Batch, Pending, Unpublished, marker_key, passes
from pgmb._core.unclosed import CLOSE_WITHIN_SECONDS, forget, remember
from pgmb.errors import PublisherClosed, PublisherFull, PublishFailed, translated
from pgmb.types import Duration, NewEvent

logger = loggers.logger("pgmb")
unpublished = loggers.logger("pgmb.unpublished")
"""Events that a publisher gives up on, each as a line that `pgmb publish --events` reads."""


class AsyncPublisher:
    """Publishes in batches what was enqueued, in the order of each stream. Made by `broker.publisher`.

    What cannot be published is kept and tried again; `flush` and the end of `with` raise PublishFailed.
    """

    def __init__(
        self, broker: AsyncPublishing, pool: Pool, held: Pending, exactly_once: bool, dedup_for: Duration
    ) -> None:
        self._broker = broker
        self._pool = pool
        self._held = held
        self._exactly_once = exactly_once
        self._dedup_for = dedup_for
        # One lock, two reasons to wait: the background for work, callers for progress.
        self._lock = AsyncLock()
        self._work = AsyncCondition(self._lock)
        self._progress = AsyncCondition(self._lock)
        self._background: AsyncBackground | None = None
        self._closed = False

    async def enqueue(
        self,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Any = None,
        stream: str = "main",
        id: UUID | None = None,
        dedup_key: str | None = None,
        block: bool = True,
        timeout: Duration | None = None,  # noqa: ASYNC109
    ) -> UUID:
        """Take an event and return its id; it is published soon. What cannot be encoded raises here.

        While `max_pending` events are held it waits, at most `timeout` seconds, and then raises
        PublisherFull; with `block=False` at once.
        """
        with self._broker.observer.enqueueing(topic, headers, stream) as observed:
            self._check_home()
            given = id or pending.fresh_id()
            event = pending.made(topic, payload, key, observed.headers, given, dedup_key)
            await self._hold(event, stream, block, durations.optional_seconds(timeout))
            observed.id = given
        return given

    async def _hold(self, event: NewEvent, stream: str, block: bool, timeout: float | None) -> None:  # noqa: ASYNC109
        deadline = None if timeout is None else time.monotonic() + timeout
        async with self._lock:
            while self._held.full and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if not block or self._held.stuck or (left is not None and left <= 0):
                    raise self._full()
                await self._progress.wait(left)
            if self._closed:
                raise PublisherClosed("the publisher is closed")
            if self._held.add(event, stream, time.monotonic()):
                self._start()
        if self._background is not None:
            await self._background.begin()

    async def flush(self, timeout: Duration | None = 30.0) -> None:  # noqa: ASYNC109
        """Wait until all that was enqueued before is committed. Raises PublishFailed with what is not.

        Events that the server rejected are tried once more. Nothing is dropped: call it again, or take out
        with `discard_failed` what will never be accepted.
        """
        self._check_home()
        seconds = durations.optional_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        async with self._lock:
            last = self._held.flush()
            if not self._held.passed(last):
                self._start()
            while not self._held.passed(last):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                await self._progress.wait(left)
            unpublished = self._held.left(last)
        if unpublished:
            raise _failure(unpublished) from next((item.error for item in unpublished if item.error), None)

    @property
    def pending(self) -> int:
        """How many events are held: waiting, on their way and failed."""
        return self._held.count

    @property
    def failed(self) -> list[Unpublished]:
        """The events that the server rejected, with the stream and the error of each."""
        return list(self._held.failed)

    async def discard_failed(self) -> list[Unpublished]:
        """Forget the events that the server rejected, and return them."""
        self._check_home()
        async with self._lock:
            gone = self._held.discard_failed()
            self._progress.notify_all()
        return gone

    async def close(self, timeout: Duration | None = 30.0) -> None:  # noqa: ASYNC109
        """Flush and stop. May be called again. Raises PublishFailed with what could not be published."""
        if self._closed:
            return
        try:
            await self.flush(timeout)
        finally:
            self._closed = True
            forget(self)
            if not self.inherited:
                await self._stop()
                self.give_up()

    @property
    def inherited(self) -> bool:
        """Whether it was made before a fork: then it serves the parent process only."""
        return self._pool.home.inherited

    @property
    def loop(self) -> AbstractEventLoop | None:
        """The event loop that it publishes in; a synchronous publisher has none."""
        return self._pool.home.loop

    def hurry(self) -> None:
        """Take batches of 2,000 events from now on: a process or event loop that ends has seconds only."""
        self._held.widen()

    def give_up(self) -> None:
        """Log each event that it still holds, in full. It publishes nothing after that."""
        for item in self._held.give_up():
            unpublished.error("an event of stream %s was not published: %s", item.stream, pending.line(item))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except PublishFailed as failed:
            if error is None:
                raise
            # The first error is the one to see; this one must not hide it, nor be lost.
            error.add_note(f"And {failed}")
            logger.error("%s", failed)

    def _check_home(self) -> None:
        if self.inherited:
            error = PublisherClosed("the publisher was made before a fork, in another process")
            error.advise("Connect, and make the publisher, after the fork.")
            raise error
        if self._pool.home.elsewhere:
            error = PublisherClosed("the publisher belongs to another event loop")
            error.advise("Connect, and make a publisher, in each event loop.")
            raise error

    def _full(self) -> PublisherFull:
        error = PublisherFull(f"the publisher holds {self._held.count} events that are not published")
        if self._held.stuck:
            error.advise(
                "The server rejected all of them: see failed, and take them out with discard_failed()."
            )
        return error

    # -- in the background -----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._background is None:
            self._background = AsyncBackground("pgmb publisher", self._run, self._rescue)
            remember(self)
        self._work.notify()

    async def _stop(self) -> None:
        async with self._lock:
            self._work.notify_all()
            self._progress.notify_all()
        if self._background is not None:
            await self._background.stop(None)

    async def _run(self) -> None:
        try:
            while (batch := await self._next()) is not None:
                await self._publish(batch)
        except GeneratorExit:
            # Its event loop was closed, and everything in it left alone.
            self._closed = True
            self.give_up()
            raise

    async def _rescue(self) -> None:
        """Publish what is held before the event loop ends. The pool's tasks were cancelled, too."""
        self._closed = True
        forget(self)
        if self._held.count:
            logger.warning(
                "a publisher was not closed; flushing %s events before its event loop ends", self._held.count
            )
        self.hurry()
        self._held.flush()
        limit, options = time.monotonic() + CLOSE_WITHIN_SECONDS, cast("dict[str, Any]", self._pool.kwargs)
        try:
            async with await aconnect(str(self._pool.conninfo), **options) as conn:
                while time.monotonic() < limit and isinstance(
                    batch := self._held.next(time.monotonic()), Batch
                ):
                    await self._publish(batch, conn)
        except Exception as error:
            logger.error("events are lost with their event loop: %s", error)
        finally:
            self.give_up()

    async def _next(self) -> Batch | None:
        """The next batch as soon as it is due; None when the publisher was closed."""
        async with self._lock:
            while not self._closed:
                found = self._held.next(time.monotonic())
                if isinstance(found, Batch):
                    return found
                await self._work.wait(found)
        return None

    async def _publish(self, batch: Batch, conn: AsyncConnection[Any] | None = None) -> None:
        refusal: Exception | None = None
        try:
            await self._attempt(batch, conn)
        except Exception as error:
            refusal = error
        except BaseException:
            self._held.released(batch)
            raise
        async with self._lock:
            aside: list[Unpublished] = []
            if refusal is None:
                self._held.committed(batch)
            else:
                aside = self._held.refused(batch, refusal, time.monotonic())
            self._progress.notify_all()
        if aside:
            logger.error("the server rejected %s events of stream %s: %s", len(aside), batch.stream, refusal)
        elif refusal is not None and passes(refusal):
            logger.warning("%s events of stream %s wait: %s", len(batch.items), batch.stream, refusal)

    async def _attempt(self, batch: Batch, conn: AsyncConnection[Any] | None) -> None:
        events = [item.event for item in batch.items]
        if not self._exactly_once:
            batch.sent = True
            await self._broker.publish_many(events, stream=batch.stream, dedup_for=self._dedup_for, conn=conn)
            return
        if not batch.uncertain and all(event.dedup_key is None for event in events):
            # The first event carries the marker, in the only statement.
            events[0] = pending.marked(events[0])
            batch.sent = True
            await self._broker.publish_many(events, stream=batch.stream, dedup_for=MARKED_FOR, conn=conn)
            return
        # The marker alone tells whether the batch is in the log: events' own keys may be taken or expired.
        connection = self._pool.connection() if conn is None else nullcontext(conn)
        async with connection as own, own.transaction():
            if await self._claim(batch, own):
                # No attempt before has committed, and this one does not before its end.
                batch.uncertain = False
                await self._broker.publish_many(
                    events, stream=batch.stream, dedup_for=self._dedup_for, conn=own
                )
            batch.sent = True

    async def _claim(self, batch: Batch, conn: AsyncConnection[Any]) -> bool:
        """Whether the batch's marker was free. It waits for a transaction that may still commit with it."""
        first = batch.items[0].event
        claim = statements.call(
            "claim_key", stream=batch.stream, key=marker_key(first), id=first.id, dedup_for=MARKED_FOR
        )
        with translated():
            cursor = await conn.execute(claim.text, claim.parameters)
            return await cursor.fetchone() == (None,)


def _failure(unpublished: list[Unpublished]) -> PublishFailed:
    error = next((item.error for item in unpublished if item.error), None)
    events: list[NewEvent] = [item.event for item in unpublished]
    if error is None:
        return PublishFailed(f"{len(events)} events were not published in time", events)
    return PublishFailed(f"{len(events)} events were not published: {error}", events)
