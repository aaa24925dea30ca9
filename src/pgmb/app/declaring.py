"""Queues as an app declares them, and the database brought to that."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from psycopg.errors import LockNotAvailable

from pgmb._async.broker import AsyncBroker
from pgmb._core import loggers
from pgmb._core.statements import interval
from pgmb._sync.broker import Broker
from pgmb.app import settling
from pgmb.app.handler import Backoff, Handler, refuse_backoff
from pgmb.app.heartbeats import HEARTBEAT_EVERY_SECONDS
from pgmb.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueNotFound,
    StreamNotFound,
    translated,
)
from pgmb.types import Position

logger = loggers.logger("pgmb.app")

_FILTER = ("equals", "filter", "condition", "params")
_INTERVALS = ("lease_for", "backoff_base", "backoff_max", "ttl")
_DECLARE = (
    "select pgmb.declare_queue(%s::uuid, %s::text, %s::text[], %s::jsonb, %s::jsonb, %s::text[],"
    " %s::text[], %s::text)::text"
)
_PRUNE = "select pgmb.prune_queue(%s::text)"

_RUNS_OTHER_CODE = "select pgmb.runs_other_code(%s::text, %s::text)"

# How long the answer to that holds.
_OTHER_CODE_SECONDS = 1.0
_AGAIN_EVERY_SECONDS = HEARTBEAT_EVERY_SECONDS
# The database forgets a worker that it has not heard of for an hour, and a queue that is dropped. Patterns
# may be removed unnoticed: when its clock jumps ahead, no worker counts as live until its next heartbeat.
_KEEP_EVERY_SECONDS = 300.0


class QueueSpec:
    """A queue as an app declares it: its handlers and settings. None leaves a setting to the database."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handlers: list[Handler] = []
        self.concurrency: int | None = None
        self.settings: dict[str, Any] = {}
        self.retry: Backoff = None
        """For handlers that have none of their own."""
        self.replaces_filter = False
        """Whether to remove a filter that the app does not declare."""

    @property
    def patterns(self) -> list[str]:
        """The union over the handlers, in the order of registration."""
        return list(dict.fromkeys(pattern for handler in self.handlers for pattern in handler.patterns))

    @property
    def code(self) -> str:
        """A digest of the handlers, their patterns and the payloads that they take."""
        handlers = sorted((one.full_name, sorted(one.patterns), one.shape) for one in self.handlers)
        return hashlib.sha256(msgspec.json.encode(handlers)).hexdigest()

    @property
    def stream(self) -> str:
        return str(self.settings.get("stream") or "main")

    @property
    def filter(self) -> dict[str, Any] | None:
        """The filter, {} for none; None if the app says nothing of one."""
        found = {name: self.settings[name] for name in _FILTER if name in self.settings}
        return found or ({} if self.replaces_filter else None)

    @property
    def declared(self) -> dict[str, Any]:
        """The settings as pgmb.declare_queue takes them, without the filter."""
        found = {name: value for name, value in self.settings.items() if name not in (*_FILTER, "starting")}
        for name in _INTERVALS:
            if name in found:
                found[name] = interval(found[name])
        if "lanes" in found:
            found["lanes"] = [found["lanes"]] if isinstance(found["lanes"], str) else list(found["lanes"])
        return {**found, "stream": self.stream}

    def add(self, handler: Handler) -> None:
        if self.handlers and (handler.batch or self.handlers[0].batch):
            refused = InvalidArgument(f"queue {self.name!r} has a batch handler, which must be its only one")
            refused.advise("Give one of them a queue of its own: queue=...")
            raise refused
        if handler.backoff is None:
            handler.backoff = self.retry
        self.handlers.append(handler)

    def retry_by(self, retry: Backoff) -> None:
        if retry is None:
            return
        refuse_backoff(retry)
        if self.retry not in (None, retry):
            raise InvalidArgument(f"queue {self.name!r}: retry is {self.retry!r} already, not {retry!r}")
        self.retry = retry
        for handler in self.handlers:
            if handler.backoff is None:
                handler.backoff = retry

    def set(self, settings: Mapping[str, Any]) -> None:
        """Add settings. Two handlers that want different ones are an error."""
        for name, value in settings.items():
            if value is None:
                continue
            if name in _INTERVALS:
                value = interval(value)
            if self.settings.setdefault(name, value) != value:
                raise InvalidArgument(
                    f"queue {self.name!r}: {name} is {self.settings[name]!r} already, not {value!r}"
                )

    def create(self, broker: Broker) -> None:
        """Create it, and its stream where there is none."""
        try:
            broker.create_queue(self.name, self.patterns, **self.settings)
        except StreamNotFound:
            broker.create_stream(self.stream)
            broker.create_queue(self.name, self.patterns, **self.settings)

    async def acreate(self, broker: AsyncBroker, starting: Position | None = None) -> None:
        """The same over an asynchronous broker; `starting` goes before what is declared."""
        settings = dict(self.settings)
        if starting is not None:
            settings["starting"] = starting
        try:
            await broker.create_queue(self.name, self.patterns, **settings)
        except StreamNotFound:
            await broker.create_stream(self.stream)
            await broker.create_queue(self.name, self.patterns, **settings)


def with_handlers(queues: Mapping[str, QueueSpec], names: Iterable[str] | None) -> list[QueueSpec]:
    """The queues of these names, or all that have handlers. InvalidArgument if one has none."""
    handled = {name: queue for name, queue in queues.items() if queue.handlers}
    if not handled:
        raise InvalidArgument("the app has no handlers")
    chosen = list(handled) if names is None else list(names)
    unknown = [name for name in chosen if name not in handled]
    if unknown or not chosen:
        refused = InvalidArgument(
            f"the app has no handler of queue {', '.join(map(repr, unknown)) or '(none)'}"
        )
        refused.advise(f"Its queues are {', '.join(handled)}.")
        raise refused
    return [handled[name] for name in chosen]


class QueueSettings(NamedTuple):
    """The settings of an existing queue that its consumer uses."""

    lease_for: float
    max_attempts: int
    ordered: bool
    fair: bool


class Declarations:
    """What a worker process declares of its queues, and the changes that wait for other workers to end."""

    def __init__(self, broker: AsyncBroker, worker: UUID | None = None) -> None:
        """Without a worker the declaration is not recorded: for one who handles a few events and ends."""
        self._broker = broker
        self._worker = worker
        self._queues: dict[str, QueueSpec] = {}
        self._pending: dict[str, list[str] | None] = {}
        """The settings that wait; None: all of the declaration, as a lock was not free."""
        self._other_code: dict[str, tuple[float, bool]] = {}
        self._told = asyncio.Event()

    async def declare(self, queues: Sequence[QueueSpec]) -> dict[str, QueueSettings]:
        """Create the queues that are not there, and their streams; add patterns, change settings.

        Where the role may not, a queue that exists is used as it is. Conflict if another app consumes one, or
        it is of another kind.
        """
        return {queue.name: await self._begin(queue) for queue in queues}

    async def prune(self) -> None:
        """Remove the patterns that neither this process nor another live worker declares."""
        for name in self._queues:
            try:
                async with self._broker.own_connection() as conn, conn.transaction():
                    with translated():
                        ((removed,),) = await (await conn.execute(_PRUNE, [name])).fetchall()
                    # Before it is committed: whoever watches can tell what was removed when the process dies.
                    if removed:
                        logger.warning(
                            "queue %s: removing %s: no live worker declares it", name, ", ".join(removed)
                        )
            except LockNotAvailable:
                logger.warning("queue %s: a transaction locks it; its patterns are not pruned", name)

    async def warn(self) -> None:
        """Log where this worker and others disagree."""
        for one in await self._broker.queue_disagreements(worker=self._worker):
            # A deployment has different patterns, and processes for other queues that start after this one.
            level = logging.INFO if one.kind in {"patterns", "stopped"} else logging.WARNING
            logger.log(level, "queue %s: %s. %s", one.queue, one.message, one.hint)

    def repeat(self) -> None:
        """Declare all in full again: others may have removed what this worker declares."""
        self._pending.update(dict.fromkeys(self._queues))
        self._told.set()

    async def run(self, changed: Callable[[str, QueueSettings], None]) -> None:
        """Make the changes that wait, once other workers are gone. Until cancelled."""
        keep_at = time.monotonic() + _KEEP_EVERY_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _AGAIN_EVERY_SECONDS)
            self._told.clear()
            keeping = time.monotonic() > keep_at
            if keeping:
                keep_at = time.monotonic() + _KEEP_EVERY_SECONDS
            for name in list(self._queues if keeping else self._pending):
                # Taken out before the answer: what is added meanwhile is not part of it.
                waiting = self._pending.pop(name, [])
                names = ["patterns", *waiting] if keeping and waiting is not None else waiting
                try:
                    found = await self._tell(self._queues[name], names)
                except settling.DATABASE_ERRORS as error:
                    if waiting != []:
                        self._pending.setdefault(name, waiting)
                    logger.warning("queue %s: cannot declare it: %s", name, str(error).strip())
                else:
                    changed(name, found.consumed)

    async def run_other_code(self, queue: str) -> bool:
        """Whether workers had other handlers of a queue lately, or handlers that take other payloads."""
        asked_at, answer = self._other_code.get(queue, (-math.inf, False))
        if time.monotonic() > asked_at + _OTHER_CODE_SECONDS:
            async with self._broker.own_connection() as conn:
                with translated():
                    cursor = await conn.execute(_RUNS_OTHER_CODE, [queue, self._queues[queue].code])
                    ((answer,),) = await cursor.fetchall()
            self._other_code[queue] = (time.monotonic(), answer)
        return answer

    async def _begin(self, queue: QueueSpec) -> QueueSettings:
        try:
            found = await self._tell(queue)
        except QueueNotFound:
            await _create(self._broker, queue)
            try:
                found = await self._tell(queue)
            except QueueNotFound:  # dropped in the meantime
                await _create(self._broker, queue)
                found = await self._tell(queue)
        self._queues[queue.name] = queue
        if found.denied:
            logger.warning("queue %s: using its existing settings: this role is not an admin", queue.name)
        return found.consumed

    async def _tell(self, queue: QueueSpec, only: list[str] | None = None) -> _Found:
        given = (
            self._worker,
            queue.name,
            queue.patterns,
            msgspec.json.encode(queue.declared).decode(),
            None if queue.filter is None else msgspec.json.encode(queue.filter).decode(),
            [handler.full_name for handler in queue.handlers],
            only,
            queue.code,
        )
        async with self._broker.own_connection() as conn:
            with translated():
                ((text,),) = await (await conn.execute(_DECLARE, given)).fetchall()
        found = msgspec.json.decode(text, type=_Found)
        if found.busy:
            logger.warning(
                "queue %s: a transaction locks it; using it as it is, declaring it later", queue.name
            )
            self._pending.setdefault(queue.name, only)
        elif found.pending:
            self._pending.setdefault(queue.name, found.pending)
        if found.added:
            logger.info("queue %s: added %s", queue.name, ", ".join(found.added))
        if found.applied or found.reset:
            logger.info("queue %s: altered %s", queue.name, ", ".join([*found.applied, *found.reset]))
        return found


class _Found(msgspec.Struct):
    """The answer of pgmb.declare_queue."""

    settings: dict[str, Any]
    added: list[str]
    applied: dict[str, Any]
    reset: list[str]
    pending: list[str]
    denied: bool
    busy: bool

    @property
    def consumed(self) -> QueueSettings:
        return QueueSettings(
            msgspec.convert(self.settings["lease_for"], timedelta).total_seconds(),
            self.settings["max_attempts"],
            self.settings["ordered"],
            self.settings["fair_by"] is not None,
        )


async def _create(broker: AsyncBroker, queue: QueueSpec) -> None:
    try:
        await queue.acreate(broker)
    except Conflict:
        return  # another process was quicker; what differs is declared next
    except PermissionDenied as error:
        missing = NotFound(f"queue {queue.name!r} does not exist, and this role may not create it")
        patterns = ",".join(queue.patterns)
        missing.advise(
            f"As an admin: select pgmb.create_queue('{queue.name}', '{{{patterns}}}');"
            " or grant the role pgmb_admin."
        )
        raise missing from error
