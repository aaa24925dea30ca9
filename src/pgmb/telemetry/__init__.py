"""Traces and metrics, for those who ask: nothing here is imported by the rest of the package.

`tracing` is for OpenTelemetry (the extra `otel`), `metrics` for Prometheus (the extra `prometheus`).
"""
