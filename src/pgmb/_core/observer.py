"""The interface between a broker and what traces and measures its calls. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, Self
from uuid import UUID

from pgmb.types import Event, NewEvent


class _Call:
    """A call of a broker. Its own context manager, for an observer that only waits for the end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class PublishCall(_Call):
    """A publish of one event: the headers to publish with, and the id that the event was given."""

    __slots__ = ("headers", "id")

    def __init__(self, headers: Any) -> None:
        self.headers = headers
        self.id: UUID | None = None


class PublishManyCall(_Call):
    """A publish of several events: the topic or events, and the headers, to publish; then their count."""

    __slots__ = ("count", "headers", "topic")

    def __init__(self, topic: str | Iterable[NewEvent], headers: Any) -> None:
        self.topic = topic
        self.headers = headers
        self.count = 0


class ReceiveCall(_Call):
    """A receive: the events, and their queue, which `receive_any` knows only at its end."""

    __slots__ = ("events", "queue")

    def __init__(self, queue: str | None) -> None:
        self.queue = queue
        self.events: Sequence[Event] = ()


class SettleCall(_Call):
    """An ack, retry, bury or release: how many events it settled."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Observer(Protocol):
    """Wraps each call of a broker from its beginning to its end, and sees what it raises."""

    def publishing(self, topic: str, headers: Any, stream: str) -> AbstractContextManager[PublishCall]: ...

    def publishing_many(
        self, topic: str | Iterable[NewEvent], payloads: Any, headers: Any, stream: str
    ) -> AbstractContextManager[PublishManyCall]: ...

    def enqueueing(self, topic: str, headers: Any, stream: str) -> AbstractContextManager[PublishCall]: ...

    def receiving(self, queue: str | None) -> AbstractContextManager[ReceiveCall]: ...

    def settling(self, operation: str, queue: str | None) -> AbstractContextManager[SettleCall]: ...


class NullObserver:
    """The observer of a broker that is not instrumented."""

    def publishing(self, topic: str, headers: Any, stream: str) -> PublishCall:
        return PublishCall(headers)

    def publishing_many(
        self, topic: str | Iterable[NewEvent], payloads: Any, headers: Any, stream: str
    ) -> PublishManyCall:
        return PublishManyCall(topic, headers)

    def enqueueing(self, topic: str, headers: Any, stream: str) -> PublishCall:
        return PublishCall(headers)

    def receiving(self, queue: str | None) -> ReceiveCall:
        return ReceiveCall(queue)

    def settling(self, operation: str, queue: str | None) -> SettleCall:
        return SettleCall()


NULL_OBSERVER: Final[Observer] = NullObserver()


class Instrumentation(Protocol):
    """Gives brokers their observers. `working` are those that serve an app's handlers."""

    def observe(self, broker: Any, *, working: bool = False) -> None: ...
