"""Process spans: what becomes of events between receiving and settling."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from pgmb.app import Delivery
from pgmb.app.routing import CallNext
from pgmb.telemetry import names
from pgmb.telemetry.context import Propagation
from pgmb.telemetry.instruments import Attributes, Instruments
from pgmb.telemetry.observing import links
from pgmb.telemetry.spans import span
from pgmb.types import Event


class Processing:
    def __init__(
        self, tracer: Tracer, instruments: Instruments, propagation: Propagation, continue_traces: bool
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._propagation = propagation
        self._continue_traces = continue_traces

    @contextmanager
    def process(self, queue: str, events: Event | Sequence[Event]) -> Generator[Span]:
        """A span around the work on one event, or on several together. It links to where each was created."""
        several = [events] if isinstance(events, Event) else events
        common: Attributes = {
            names.SYSTEM: names.PGMB,
            names.OPERATION_NAME: names.PROCESS,
            names.OPERATION_TYPE: names.PROCESS,
            names.DESTINATION: queue,
        }
        context: Context | None = None
        attributes = dict(common)
        if several:
            attributes[names.STREAM] = several[0].stream
        if isinstance(events, Event):
            attributes |= _of_one(events)
            created = self._propagation.created_of(events)
            linked = [] if created is None else [Link(created)]
            if self._continue_traces:
                context = self._propagation.context_of(events)
        else:
            attributes[names.BATCH_COUNT] = len(several)
            linked = links(self._propagation, several)
        name, began = f"process {queue}", time.perf_counter()
        try:
            with span(self._tracer, name, SpanKind.CONSUMER, attributes, linked, context) as begun:
                yield begun
        except BaseException as error:
            common[names.ERROR_TYPE] = names.error_type(error)
            raise
        finally:
            self._instruments.process.record(time.perf_counter() - began, common)

    async def middleware(self, delivery: Any, call_next: CallNext) -> None:
        """The same around each call of an app's handlers."""
        if isinstance(delivery, Delivery):
            with self.process(delivery.queue, delivery.event):
                await call_next(cast("Any", delivery))
        else:
            batch = cast("list[Delivery[Any]]", delivery)
            with self.process(batch[0].queue, [one.event for one in batch]):
                await call_next(batch)


def _of_one(event: Event) -> Attributes:
    return {
        names.MESSAGE_ID: str(event.id),
        names.TOPIC: event.topic,
        names.SEQ: event.seq,
        names.ATTEMPT: event.attempt,
    }
