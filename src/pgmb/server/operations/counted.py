"""What this process counted, as Prometheus reads it. Labels are route templates, methods and classes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from pgmb.server.counts import Counts


def families(counts: Counts) -> Iterator[Metric]:
    info = GaugeMetricFamily("pgmb_build_info", "The version that runs, as a label.", labels=("version",))
    info.add_metric([version("pgmb")], 1.0)
    yield info
    yield from _requests(counts)
    yield from _sse(counts)


def _requests(counts: Counts) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "pgmb_http_requests", "Requests that were answered.", labels=("route", "method", "status")
    )
    for labels, count in counts.requests.items():
        requests.add_metric(labels, count)
    yield requests
    durations = HistogramMetricFamily(
        "pgmb_http_request_duration_seconds",
        "From the request to the end of its answer; of server-sent events to its beginning.",
        labels=("route",),
    )
    for route, took in counts.durations.items():
        durations.add_metric([route], took.buckets(), took.seconds)
    yield durations
    yield GaugeMetricFamily("pgmb_http_requests_in_progress", "Requests under way.", value=counts.in_progress)


def _sse(counts: Counts) -> Iterator[Metric]:
    yield GaugeMetricFamily("pgmb_sse_clients", "Readers of server-sent events.", value=counts.sse_clients)
    for name, description, value in (
        ("pgmb_sse_events", "Events sent to them.", counts.sse_events),
        ("pgmb_sse_bytes", "Bytes sent to them.", counts.sse_bytes),
        ("pgmb_sse_dropped", "Readers dropped for being too slow.", counts.sse_dropped),
        ("pgmb_sse_resumed", "Readers that came back with a position.", counts.sse_resumed),
        ("pgmb_sse_reset", "Readers whose position was too old.", counts.sse_reset),
        ("pgmb_sse_replayed_events", "Events read again for those that came back.", counts.sse_replayed),
    ):
        yield CounterMetricFamily(name, description, value=value)
