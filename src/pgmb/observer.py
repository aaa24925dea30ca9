"""What may look on while a broker works. No I/O, and nothing of what observers are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from uuid import UUID

from pgmb.types import Event, NewEvent


class One:
    """An event on its way: the headers it shall go with, and the id it was given."""

    __slots__ = ("headers", "id")

    def __init__(self, headers: Any) -> None:
        self.headers = headers
        self.id: UUID | None = None


class Many:
    """Events on their way: what to publish instead of what was given, and how many it came to."""

    __slots__ = ("count", "headers", "topic")

    def __init__(self, topic: str | Iterable[NewEvent], headers: Any) -> None:
        self.topic = topic
        self.headers = headers
        self.count = 0


class Received:
    """What a receive gave, and of which queue, where that is known only now."""

    __slots__ = ("events", "queue")

    def __init__(self, queue: str | None) -> None:
        self.queue = queue
        self.events: Sequence[Event] = ()


class Settled:
    """How many events a call settled."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Observer(Protocol):
    """Sees each call of a broker from its beginning to its end, and what it raises."""

    def publishing(self, topic: str, headers: Any, stream: str) -> AbstractContextManager[One]: ...

    def publishing_many(
        self, topic: str | Iterable[NewEvent], payloads: Any, headers: Any, stream: str
    ) -> AbstractContextManager[Many]: ...

    def enqueueing(self, topic: str, headers: Any, stream: str) -> AbstractContextManager[One]: ...

    def receiving(self, queue: str | None) -> AbstractContextManager[Received]: ...

    def settling(self, operation: str, queue: str | None) -> AbstractContextManager[Settled]: ...


class Observing(Protocol):
    """Gives brokers their observers. `working` are those that serve an app's handlers."""

    def observe(self, broker: Any, *, working: bool = False) -> None: ...
