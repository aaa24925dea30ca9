"""OpenTelemetry: traces that go with the events, and metrics, for a broker or an app."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from opentelemetry.metrics import MeterProvider
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Span, TracerProvider, get_tracer

from pgmb._async.broker import AsyncBroker
from pgmb._sync.broker import Broker
from pgmb.app import App
from pgmb.telemetry import names
from pgmb.telemetry.context import Propagation
from pgmb.telemetry.instruments import Instruments
from pgmb.telemetry.observing import BrokerObserver, Template
from pgmb.telemetry.processing import Processing
from pgmb.types import Event


class Telemetry:
    """What `instrument` returns."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        propagator: TextMapPropagator | None,
        template: Template | None,
        continue_traces: bool,
    ) -> None:
        self._tracer = get_tracer(names.SCOPE, None, tracer_provider, names.SCHEMA)
        self._instruments = Instruments(meter_provider)
        self._propagation = Propagation(propagator)
        self._template = template
        self._processing = Processing(self._tracer, self._instruments, self._propagation, continue_traces)
        self.middleware = self._processing.middleware

    def process(self, queue: str, events: Event | Sequence[Event]) -> AbstractContextManager[Span]:
        """A process span, for loops of your own: `with telemetry.process(lease.queue, event): ...`.

        An app has them by itself. Several events are one span with links to where each was published.
        """
        return self._processing.process(queue, events)

    def observe(self, broker: Broker | AsyncBroker, *, working: bool = False) -> None:
        """Trace and measure the calls of a broker. `working` is one that serves an app's handlers."""
        broker.observer = BrokerObserver(
            self._tracer, self._instruments, self._propagation, self._template, broker.server, working
        )


def instrument(
    target: Broker | AsyncBroker | App,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    propagator: TextMapPropagator | None = None,
    template: Template | None = None,
    continue_traces: bool = True,
) -> Telemetry:
    """Have a broker or an app traced and measured, by OpenTelemetry's global providers unless told others.

    Published events carry the trace context in their headers. With `continue_traces` the span of a single
    event's processing is in the publisher's trace; it links there in any case. `template` says what stands
    for a topic in the names of spans and in metrics, which leave topics out without it. Instrument an app
    before it works. Instrumented again, the last one counts.
    """
    telemetry = Telemetry(tracer_provider, meter_provider, propagator, template, continue_traces)
    if isinstance(target, App):
        earlier = target.observer
        if isinstance(earlier, Telemetry):
            target.middlewares.remove(earlier.middleware)
        target.middlewares.insert(0, telemetry.middleware)
        target.observe_by(telemetry)
    else:
        telemetry.observe(target)
    return telemetry
