"""Handlers of a group: each has a queue of its own, and handles sets of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from pgmb.app.declaring import QueueSpec
from pgmb.app.handler import Backoff, Handler
from pgmb.app.progress import SplitBy
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, Event, Position

SetHandler = TypeVar("SetHandler", bound=Callable[[list[Any]], object])


class GroupApp(Protocol):
    """The app of a group, as far as the group uses it."""

    def queue_spec(self, name: str) -> QueueSpec: ...

    async def work(
        self,
        stop: asyncio.Event | None = None,
        *,
        queues: Iterable[str] | None = None,
        grace: Duration | None = None,
    ) -> None: ...

    def run(self, *, queues: Iterable[str] | None = None, grace: Duration | None = None) -> None: ...


class HandlerGroup:
    """Reliable handlers under one name. Made by `app.group`."""

    def __init__(self, app: GroupApp, name: str) -> None:
        self.name = name
        self._app = app
        self._queues: list[str] = []

    def handler(
        self,
        name: str,
        patterns: Iterable[str] = ("#",),
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        retry_after: Backoff = None,
        split_by: SplitBy | None = None,
        max: int = 100,
        concurrency: int = 1,
        timeout: Duration | None = None,
        stream: str | None = None,
        starting: Position | None = None,
        lease_for: Duration | None = None,
        localns: Mapping[str, Any] | None = None,
    ) -> Callable[[SetHandler], SetHandler]:
        """Have a function handle the events that match, at most `max` at a time: it is called with a list.

        Where it raises, exactly that set of events is tried again after the next time of `retry_after`, and
        becomes dead letters after the last. `split_by` takes a list of events and returns lists of them,
        which are handled apart, each a set of its own. The list holds events, or what its annotation says:
        payloads, deliveries; `localns` is that of `App.on`. The handler reads the queue "group/name". New
        patterns are added to it; another filter, or none, holds once all live workers declare it.
        """
        if isinstance(patterns, str):
            raise InvalidArgument(f"patterns must be a list of strings, got {patterns!r}")
        queue = f"{self.name}/{name}"
        asked = tuple(patterns)

        def register(function: SetHandler) -> SetHandler:
            handler = Handler(
                function,
                asked,
                timeout=timeout,
                retry=retry_after,
                batch=max,
                together=True,
                split_by=split_by,
                localns=localns,
                unannotated=Event,
            )
            spec = self._app.queue_spec(queue)
            spec.add(handler)
            spec.concurrency = concurrency
            spec.replaces_filter = True
            spec.set(
                {
                    "equals": equals,
                    "filter": filter,
                    "condition": condition,
                    "params": params,
                    "stream": stream,
                    "starting": starting,
                    "lease_for": lease_for,
                    "max_attempts": handler.attempts,
                }
            )
            self._queues.append(queue)
            return function

        if concurrency < 1:
            raise InvalidArgument(f"concurrency must be at least 1, got {concurrency}")
        return register

    async def work(self, stop: asyncio.Event | None = None, *, grace: Duration | None = None) -> None:
        """Run the group's handlers until `stop` is set; see `App.work`, which runs those of all groups."""
        await self._app.work(stop, queues=self._queues, grace=grace)

    def run(self, *, grace: Duration | None = None) -> None:
        """Run the group's handlers until SIGTERM or SIGINT; see `App.run`."""
        self._app.run(queues=self._queues, grace=grace)
