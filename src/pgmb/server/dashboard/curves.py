"""What the charts draw: curves out of samples. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pgmb.server.dashboard.sampler import Point, Posted, Sample

_MOST_CURVES = 6
"""In one chart: more cannot be told apart."""

Curves: TypeAlias = dict[str, dict[str, list[float | None]]]
"""By chart, by name, one value a sample."""


def of_overview(samples: Sequence[Sample]) -> Curves:
    """Rates by stream and queue, depth and age of the queues that stand out."""
    streams = _busiest(samples, lambda sample: sample.published)
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
    """Of one, or of all together."""
    posted = [sample.posted if name is None else sample.busy.get(name, Posted()) for sample in samples]
    return {
        "posted": {
            "delivered": [_rounded(one.delivered) for one in posted],
            "failed": [_rounded(one.failed) for one in posted],
        }
    }


def last(curves: Curves) -> dict[str, dict[str, float | None]]:
    """The newest value of each."""
    return {
        chart: {name: values[-1] for name, values in series.items() if values}
        for chart, series in curves.items()
    }


def _by_queue(samples: Sequence[Sample], value: Callable[[Point], float]) -> dict[str, list[float | None]]:
    def of(sample: Sample) -> dict[str, float]:
        return {name: value(point) for name, point in sample.points.items()}

    named = [of(sample) for sample in samples]
    names = _largest(named)
    return {name: [_rounded(values.get(name)) for values in named] for name in names}


def _busiest(samples: Sequence[Sample], of: Callable[[Sample], dict[str, float]]) -> list[str]:
    return _largest([of(sample) for sample in samples])


def _largest(named: Sequence[dict[str, Any]]) -> list[str]:
    highest: dict[str, float] = {}
    for values in named:
        for name, value in values.items():
            highest[name] = max(highest.get(name, 0.0), value)
    largest = sorted(highest, key=lambda name: (-highest[name], name))[:_MOST_CURVES]
    # By name, so that a colour stays with its queue while places change.
    return sorted(largest)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
