"""The observer of a broker: spans and measurements of its calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import msgspec
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

from pgmb._core.observer import PublishCall, PublishManyCall, ReceiveCall, SettleCall
from pgmb.telemetry import names
from pgmb.telemetry.context import Propagation
from pgmb.telemetry.instruments import Attributes, Instruments
from pgmb.telemetry.spans import fail, span
from pgmb.types import Event, NewEvent

logger = logging.getLogger("pgmb.telemetry")

Template: TypeAlias = Callable[[str], str | None]
"""What stands for a topic in the names of spans and in metrics; None if nothing does."""


MAX_LINKS = 128
"""OpenTelemetry's own limit: of more it would keep the last, after all the work for the others."""


class BrokerObserver:
    """Sees one broker. `working` tells that it serves handlers: its receiving and settling is only measured.

    Those have process spans, which say more, and a worker at rest would tell of every look at a queue.
    """

    def __init__(
        self,
        tracer: Tracer,
        instruments: Instruments,
        propagation: Propagation,
        template: Template | None,
        server: tuple[str | None, int | None],
        working: bool = False,
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._propagation = propagation
        self._template = template
        self._working = working
        self._common: Attributes = {names.SYSTEM: names.PGMB}
        host, port = server
        if host is not None:
            self._common[names.SERVER_ADDRESS] = host
        if port is not None:
            self._common[names.SERVER_PORT] = port

    # -- publishing

    @contextmanager
    def publishing(self, topic: str, headers: Any, stream: str) -> Generator[PublishCall]:
        created = self._propagation.created(headers)
        destination, measured = self._topic(topic)
        operation = _operation("publish", names.SEND)
        with (
            self._measured({**operation, **measured}, lambda: 1),
            span(
                self._tracer,
                f"publish {measured.get(names.DESTINATION_TEMPLATE, topic)}",
                SpanKind.PRODUCER if created is None else SpanKind.CLIENT,
                {**self._common, **operation, **destination, names.STREAM: stream},
                [] if created is None else [Link(created)],
            ) as begun,
        ):
            one = PublishCall(self._propagation.injected(headers) if created is None else headers)
            yield one
            begun.set_attribute(names.MESSAGE_ID, str(one.id))

    @contextmanager
    def enqueueing(self, topic: str, headers: Any, stream: str) -> Generator[PublishCall]:
        """A create span: the event is sent later, with others, and keeps the context that it was made in."""
        if self._propagation.created(headers) is not None:
            yield PublishCall(headers)
            return
        destination, measured = self._topic(topic)
        with span(
            self._tracer,
            f"create {measured.get(names.DESTINATION_TEMPLATE, topic)}",
            SpanKind.PRODUCER,
            {**self._common, **_operation("create", names.CREATE), **destination, names.STREAM: stream},
        ) as begun:
            one = PublishCall(self._propagation.injected(headers))
            yield one
            begun.set_attribute(names.MESSAGE_ID, str(one.id))

    @contextmanager
    def publishing_many(
        self, topic: str | Iterable[NewEvent], payloads: Any, headers: Any, stream: str
    ) -> Generator[PublishManyCall]:
        batch = _Batch(self._propagation, topic, payloads, headers)
        operation = _operation("publish", names.SEND)
        measured: Attributes = dict(operation)
        with (
            self._measured(measured, batch.size),
            span(
                self._tracer,
                "publish",
                SpanKind.CLIENT if batch.all_created else SpanKind.PRODUCER,
                {**self._common, **operation, names.STREAM: stream},
                [Link(created) for created in batch.created],
            ) as begun,
        ):
            batch.carry(begun)
            try:
                yield batch.many
                begun.set_attribute(names.BATCH_COUNT, batch.many.count)
            finally:
                if batch.topic is not None:
                    destination, low = self._topic(batch.topic)
                    measured.update(low)
                    begun.set_attributes(destination)
                    begun.update_name(f"publish {low.get(names.DESTINATION_TEMPLATE, batch.topic)}")

    # -- receiving

    @contextmanager
    def receiving(self, queue: str | None) -> Generator[ReceiveCall]:
        """The span is made afterwards, when the links are known. One that found nothing is not told of."""
        began = time.time_ns()
        received = ReceiveCall(queue)
        operation = _operation("receive", names.RECEIVE)
        measured: Attributes = dict(operation)
        try:
            with self._measured(measured):
                yield received
                if received.queue is not None:
                    measured[names.DESTINATION] = received.queue
        except BaseException as error:
            if not self._working:
                self._receive_span(received, began, operation, error)
            raise
        if not received.events:
            return
        self._instruments.consumed.add(len(received.events), {**self._common, **measured})
        if not self._working:
            self._receive_span(received, began, operation)

    def _receive_span(
        self, received: ReceiveCall, began: int, operation: Attributes, error: BaseException | None = None
    ) -> None:
        attributes: Attributes = {**self._common, **operation, names.BATCH_COUNT: len(received.events)}
        if received.queue is not None:
            attributes[names.DESTINATION] = received.queue
        if received.events:
            attributes[names.STREAM] = received.events[0].stream
        begun = self._tracer.start_span(
            "receive" if received.queue is None else f"receive {received.queue}",
            None,
            SpanKind.CLIENT,
            attributes,
            links(self._propagation, received.events),
            began,
        )
        if error is not None:
            fail(begun, error)
        begun.end()

    @contextmanager
    def settling(self, operation: str, queue: str | None) -> Generator[SettleCall]:
        settled = SettleCall()
        attributes = _operation(operation, names.SETTLE)
        if queue is not None:
            attributes[names.DESTINATION] = queue
        with self._measured(attributes):
            if self._working:
                yield settled
                return
            name = operation if queue is None else f"{operation} {queue}"
            with span(self._tracer, name, SpanKind.CLIENT, {**self._common, **attributes}) as begun:
                yield settled
                begun.set_attribute(names.BATCH_COUNT, settled.count)

    # -- both

    @contextmanager
    def _measured(self, attributes: Attributes, sent: Callable[[], int] | None = None) -> Generator[None]:
        """Measures the operation, and with `sent` how many events it was to send."""
        began = time.perf_counter()
        try:
            yield
        except BaseException as error:
            attributes[names.ERROR_TYPE] = names.error_type(error)
            raise
        finally:
            labels = {**self._common, **attributes}
            self._instruments.operation.record(time.perf_counter() - began, labels)
            if sent is not None:
                self._instruments.sent.add(sent(), labels)

    def _templated(self, topic: str) -> str | None:
        if self._template is None:
            return None
        try:
            return self._template(topic)
        except Exception:
            # Observing does not keep anybody from publishing.
            logger.exception("the template failed for topic %r", topic)
            return None

    def _topic(self, topic: str) -> tuple[Attributes, Attributes]:
        """What a span tells of a topic, and what a metric does."""
        template = self._templated(topic)
        if template is None:
            return {names.DESTINATION: topic}, {}
        if template == topic:
            return {names.DESTINATION: topic}, {names.DESTINATION: topic}
        return (
            {names.DESTINATION: topic, names.DESTINATION_TEMPLATE: template},
            {names.DESTINATION_TEMPLATE: template},
        )


class _Batch:
    """Events of one publish_many, and the contexts that they bring themselves."""

    def __init__(
        self, propagation: Propagation, topic: str | Iterable[NewEvent], payloads: Any, headers: Any
    ) -> None:
        self._propagation = propagation
        self.many = PublishManyCall(topic, headers)
        given: object = payloads if isinstance(topic, str) else topic
        self._sized = given if isinstance(given, Sized) else None
        self.topic = topic if isinstance(topic, str) else None
        """The topic, if there is only one; of an iterable known in the end."""
        self.created: list[SpanContext] = []
        self.all_created = False
        if isinstance(topic, str):
            own = propagation.created(headers)
            self.created = [] if own is None else [own]
            self.all_created = own is not None
            return
        events: Iterable[NewEvent] = topic
        if isinstance(events, Sequence):
            found = [propagation.created(event.headers) for event in events]
            self.created = [one for one in found if one is not None]
            self.all_created = bool(found) and len(self.created) == len(found)

    def carry(self, begun: Span) -> None:
        """Have them go with the context of the span, which is current."""
        if not isinstance(self.many.topic, str):
            plain = self._propagation.injected(None)
            self.many.topic = self._each(self.many.topic, begun, plain)
        elif not self.all_created:
            self.many.headers = self._propagation.injected(self.many.headers)

    def _each(self, events: Iterable[NewEvent], begun: Span, plain: Any) -> Iterator[NewEvent]:
        known = isinstance(events, Sequence)
        topics: set[str] = set()
        for event in events:
            if len(topics) < 2:
                topics.add(event.topic)
                self.topic = event.topic if len(topics) == 1 else None
            headers = plain
            if event.headers is not None:
                created = self._propagation.created(event.headers)
                if created is not None:
                    if not known:
                        begun.add_link(created)
                    yield event
                    continue
                headers = self._propagation.injected(event.headers)
            yield event if headers is event.headers else msgspec.structs.replace(event, headers=headers)

    def size(self) -> int:
        """How many were to be sent; of an iterable only what was."""
        return self.many.count if self._sized is None else len(self._sized)


def _operation(name: str, kind: str) -> Attributes:
    return {names.OPERATION_NAME: name, names.OPERATION_TYPE: kind}


def links(propagation: Propagation, events: Iterable[Event]) -> list[Link]:
    """To where each event was created, as far as its headers tell, up to MAX_LINKS."""
    return [
        Link(created, {names.MESSAGE_ID: str(event.id)})
        for event in islice(events, MAX_LINKS)
        if (created := propagation.created_of(event)) is not None
    ]
