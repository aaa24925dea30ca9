"""Prometheus: what became of the events that an app's handlers in this process were called for."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from pgmb.app import App, Delivery
from pgmb.app.outcome import Reject
from pgmb.app.routing import CallNext

Outcome: TypeAlias = Literal["done", "retried", "buried", "released"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Queue(NamedTuple):
    outcomes: dict[Outcome, Counter]
    seconds: Histogram
    running: Gauge


class HandlerMetrics:
    """Counts deliveries by outcome, times the handlers' calls. `middleware` is what an app is given."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._events = Counter(
            "pgmb_handler_events",
            "Deliveries to handlers, by outcome: done, retried, buried, released.",
            ["queue", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "pgmb_handler_duration_seconds",
            "How long handlers took, a call each: an event or a batch.",
            ["queue"],
            registry=registry,
            buckets=SECONDS,
        )
        self._running = Gauge(
            "pgmb_handler_running",
            "Calls of handlers under way.",
            ["queue"],
            registry=registry,
            multiprocess_mode="livesum",
        )

        self._queues: dict[str, _Queue] = {}

    async def middleware(self, delivery: Any, call_next: CallNext) -> None:
        batch = cast("list[Delivery[Any]]", delivery if isinstance(delivery, list) else [delivery])
        queue = self._of(batch[0].queue)
        queue.running.inc()
        began = time.perf_counter()
        raised: BaseException | None = None
        try:
            await call_next(delivery)
        except BaseException as error:
            raised = error
            raise
        finally:
            queue.running.dec()
            queue.seconds.observe(time.perf_counter() - began)
            for one in batch:
                queue.outcomes[_outcome(one, raised)].inc()

    def _of(self, name: str) -> _Queue:
        # Looking up labels costs more than counting.
        found = self._queues.get(name)
        if found is None:
            outcomes: dict[Outcome, Counter] = {one: self._events.labels(name, one) for one in OUTCOMES}
            found = _Queue(outcomes, self._seconds.labels(name), self._running.labels(name))
            self._queues[name] = found
        return found


def _outcome(delivery: Delivery[Any], raised: BaseException | None) -> Outcome:
    # What a handler said of single events of a batch stands, whatever it raised.
    failure = delivery.progress.failed.get(delivery.seq)
    if failure is not None:
        final = failure.final
    elif raised is None:
        return "done"
    elif isinstance(raised, asyncio.CancelledError):
        return "released"
    else:
        final = isinstance(raised, Reject)
    most = delivery.progress.max_attempts
    return "buried" if final or (most is not None and delivery.attempt >= most) else "retried"


def export_handlers(app: App, registry: CollectorRegistry = REGISTRY) -> HandlerMetrics:
    """Count and time an app's handlers, from its next start on."""
    metrics = HandlerMetrics(registry)
    app.middlewares.insert(0, metrics.middleware)
    return metrics
