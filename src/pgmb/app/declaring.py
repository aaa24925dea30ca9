"""Queues as an app declares them, and the database brought to that."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from pgmb._async.broker import AsyncBroker
from pgmb._core.statements import interval
from pgmb._sync.broker import Broker
from pgmb.app.handler import Backoff, Handler, refuse_backoff
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

logger = logging.getLogger("pgmb.app")

_AT_CREATION = ("stream", "starting", "ordered", "lanes", "shards", "fair_by")
"""What alter_queue does not change."""
_FILTER_SETTINGS = ("equals", "filter", "condition", "params")
"""What bind changes, beside the patterns."""


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
    def stream(self) -> str:
        return str(self.settings.get("stream") or "main")

    @property
    def filter_settings(self) -> dict[str, Any]:
        """The filter, as bind takes it; empty if none is declared."""
        return {name: self.settings[name] for name in _FILTER_SETTINGS if name in self.settings}

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


async def declare(broker: AsyncBroker, queues: Sequence[QueueSpec]) -> dict[str, QueueSettings]:
    """Create the queues that are not there, and their streams, bind changed patterns, alter changed settings.

    Where the role may not, a queue that exists is used as it is.
    """
    found: dict[str, QueueSettings] = {}
    for queue in queues:
        try:
            found[queue.name] = await _declare(broker, queue)
        except QueueNotFound:  # dropped in the meantime: try again
            found[queue.name] = await _declare(broker, queue)
    return found


async def _declare(broker: AsyncBroker, queue: QueueSpec) -> QueueSettings:
    try:
        present = await _present(broker, queue.name)
    except QueueNotFound:
        await _create(broker, queue)
        present = await _present(broker, queue.name)
    try:
        await _bind(broker, queue, present)
        if await _alter(broker, queue, present):
            present = await _present(broker, queue.name)
    except PermissionDenied as error:
        logger.warning("queue %s: using its existing settings: %s", queue.name, error)
    return QueueSettings(
        msgspec.convert(present["lease_for"], timedelta).total_seconds(),
        present["max_attempts"],
        present["ordered"],
        present["fair_by"] is not None,
    )


async def _present(broker: AsyncBroker, queue: str) -> dict[str, Any]:
    async with broker.connection() as conn:
        with translated():
            cursor = await conn.execute("select pgmb.queue_settings(%s)::text", [queue])
            (settings,) = await cursor.fetchone() or ("{}",)
    return dict(msgspec.json.decode(settings))


async def _create(broker: AsyncBroker, queue: QueueSpec) -> None:
    try:
        await queue.acreate(broker)
    except Conflict:
        return  # another process was quicker; what differs is bound and altered next
    except PermissionDenied as error:
        missing = NotFound(f"queue {queue.name!r} does not exist, and this role may not create it")
        patterns = ",".join(queue.patterns)
        missing.advise(
            f"As an admin: select pgmb.create_queue('{queue.name}', '{{{patterns}}}');"
            " or grant the role pgmb_admin."
        )
        raise missing from error


async def _bind(broker: AsyncBroker, queue: QueueSpec, present: Mapping[str, Any]) -> None:
    bound = {one.queue: one.patterns for one in await broker.queue_status()}
    if queue.name not in bound:
        raise QueueNotFound(f"queue {queue.name!r} does not exist")
    if set(bound[queue.name]) == set(queue.patterns) and await _has_same_filter(broker, queue, present):
        return
    # A filter that was set elsewhere stays if the app declares none.
    kept = {name: present[name] for name in _FILTER_SETTINGS if present.get(name) is not None}
    await broker.bind(
        queue.name,
        queue.patterns,
        **(queue.filter_settings if queue.replaces_filter else queue.filter_settings or kept),
    )
    logger.info("queue %s: bound to %s", queue.name, ", ".join(queue.patterns))


async def _has_same_filter(broker: AsyncBroker, queue: QueueSpec, present: Mapping[str, Any]) -> bool:
    if "condition" not in queue.filter_settings:
        wanted = msgspec.json.decode(msgspec.json.encode(queue.filter_settings))
        return not (wanted or queue.replaces_filter) or all(
            present.get(name) == wanted.get(name) for name in _FILTER_SETTINGS
        )
    try:
        # The database keeps conditions in its own words, and compares them so.
        await queue.acreate(broker)
    except Conflict:
        return False
    return True


async def _alter(broker: AsyncBroker, queue: QueueSpec, present: Mapping[str, Any]) -> bool:
    if queue.stream != present.get("stream_name", queue.stream):
        raise Conflict(f"queue {queue.name!r} reads stream {present['stream_name']!r}, not {queue.stream!r}")
    if bool(queue.settings.get("ordered", present["ordered"])) != present["ordered"]:
        conflict = Conflict(f"queue {queue.name!r} exists with ordered={present['ordered']}")
        conflict.advise("Whether a queue is ordered cannot be changed: drop it, or take another name.")
        raise conflict
    if queue.settings.get("fair_by", present["fair_by"]) != present["fair_by"]:
        conflict = Conflict(f"queue {queue.name!r} exists with fair_by={present['fair_by']!r}")
        conflict.advise("Whether a queue is fair cannot be changed: drop it, or take another name.")
        raise conflict
    changed = {
        name: value
        for name, value in queue.settings.items()
        if name not in (*_AT_CREATION, *_FILTER_SETTINGS) and not _same(value, present.get(name))
    }
    if changed:
        await broker.alter_queue(queue.name, **changed)
        logger.info("queue %s: altered %s", queue.name, ", ".join(changed))
    return bool(changed)


def _same(wanted: Any, present: Any) -> bool:
    if isinstance(present, str) and present.startswith("P"):
        return bool(interval(wanted) == msgspec.convert(present, timedelta))
    return bool(wanted == present)
