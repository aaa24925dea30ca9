"""OpenTelemetry's messaging metrics."""

from __future__ import annotations

from typing import TypeAlias

from opentelemetry.metrics import Histogram, Meter, MeterProvider, get_meter

from pgmb.telemetry import names

Attributes: TypeAlias = dict[str, str | int]


class Instruments:
    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = get_meter(names.SCOPE, _version(), provider, names.SCHEMA)
        self.sent = meter.create_counter(
            names.SENT_MESSAGES, "{message}", "Number of messages producer attempted to send to the broker."
        )
        self.consumed = meter.create_counter(
            names.CONSUMED_MESSAGES, "{message}", "Number of messages that were delivered to the application."
        )
        self.operation = _seconds(
            meter,
            names.OPERATION_DURATION,
            "Duration of messaging operation initiated by a producer or consumer client.",
        )
        self.process = _seconds(meter, names.PROCESS_DURATION, "Duration of processing operation.")


def _seconds(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=list(names.SECONDS)
    )


def _version() -> str:
    from importlib.metadata import version

    return version("pgmb")
