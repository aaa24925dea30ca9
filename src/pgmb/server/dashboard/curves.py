"""Samples as the curves of charts. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from pgmb.server.dashboard.sampler import Point, Posted, Sample, Sampler

_MOST_CURVES = 6
"""Curves per chart: more cannot be told apart."""

Curves: TypeAlias = dict[str, dict[str, list[float | None]]]
"""By chart and name, one value per sample."""


class Scope(msgspec.Struct, frozen=True):
    """The subject of a page's charts: a queue, stream or endpoint, all endpoints, or the overview."""

    queue: str | None = None
    stream: str | None = None
    endpoint: str | None = None
    endpoints: bool = False


class CurveCache:
    """The curves by scope, computed once per sample for all viewers."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._number = 0
        self._drawn: dict[Scope, Curves] = {}

    def of(self, scope: Scope) -> Curves:
        newest = self._sampler.newest
        number = newest.number if newest else 0
        if number != self._number:
            self._number = number
            self._drawn.clear()
        if scope not in self._drawn:
            self._drawn[scope] = draw_curves(list(self._sampler.samples), scope)
        return self._drawn[scope]


def draw_curves(samples: Sequence[Sample], scope: Scope) -> Curves:
    if scope.queue is not None:
        return of_queue(samples, scope.queue)
    if scope.stream is not None:
        return of_stream(samples, scope.stream)
    if scope.endpoint is not None or scope.endpoints:
        return of_endpoints(samples, scope.endpoint)
    return of_overview(samples)


def of_overview(samples: Sequence[Sample]) -> Curves:
    """Rates by stream and queue, and depth and age of the largest queues."""
    streams = _largest([sample.published for sample in _thinned(samples)])
    return {
        "published": {name: [_rounded(sample.published.get(name)) for sample in samples] for name in streams},
        "received": _by_queue(samples, lambda point: point.rate),
        "waiting": _by_queue(samples, lambda point: float(point.waiting)),
        "oldest": _by_queue(samples, lambda point: point.oldest or 0.0),
    }


def of_queue(samples: Sequence[Sample], name: str) -> Curves:
    points = [sample.points.get(name) for sample in samples]

    def curve(value: Callable[[Point], float]) -> list[float | None]:
        return [None if point is None else _rounded(value(point)) for point in points]

    return {
        "received": {"received": curve(lambda point: point.rate)},
        "waiting": {
            "waiting": curve(lambda point: point.waiting),
            "leased": curve(lambda point: point.leased),
            "to be retried": curve(lambda point: point.retries),
        },
        "oldest": {"oldest": curve(lambda point: point.oldest or 0.0)},
    }


def of_stream(samples: Sequence[Sample], name: str) -> Curves:
    return {"published": {name: [_rounded(sample.published.get(name)) for sample in samples]}}


def of_endpoints(samples: Sequence[Sample], name: str | None) -> Curves:
    """Curves of one endpoint, or of all together."""
    posted = [sample.posted if name is None else sample.busy.get(name, Posted()) for sample in samples]
    return {
        "posted": {
            "delivered": [_rounded(one.delivered) for one in posted],
            "failed": [_rounded(one.failed) for one in posted],
        }
    }


def last_values(curves: Curves) -> dict[str, dict[str, float | None]]:
    """The newest value of each curve."""
    return {
        chart: {name: values[-1] for name, values in series.items() if values}
        for chart, series in curves.items()
    }


def _by_queue(samples: Sequence[Sample], value: Callable[[Point], float]) -> dict[str, list[float | None]]:
    names = _largest(
        [{name: value(point) for name, point in sample.points.items()} for sample in _thinned(samples)]
    )
    points = {name: [sample.points.get(name) for sample in samples] for name in names}
    return {
        name: [None if point is None else _rounded(value(point)) for point in curve]
        for name, curve in points.items()
    }


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Enough samples to find the largest."""
    return [*samples[::10], *samples[-1:]]


def _largest(named: Sequence[dict[str, Any]]) -> list[str]:
    highest: dict[str, float] = {}
    for values in named:
        for name, value in values.items():
            highest[name] = max(highest.get(name, 0.0), value)
    largest = sorted(highest, key=lambda name: (-highest[name], name))[:_MOST_CURVES]
    # Sorted by name, so that a queue keeps its colour when ranks change.
    return sorted(largest)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
