"""Spans around what the package does."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from pgmb.app.outcome import Reject, Retry
from pgmb.telemetry import names

Values: TypeAlias = Mapping[str, str | int]


@contextmanager
def span(
    tracer: Tracer,
    name: str,
    kind: SpanKind,
    attributes: Values,
    links: Sequence[Link] = (),
    context: Context | None = None,
) -> Generator[Span]:
    """A span that is current inside, with the rest of its context, and tells of what was raised there."""
    begun = tracer.start_span(name, context, kind, attributes, links)
    token = attach(set_span_in_context(begun, context))
    try:
        yield begun
    except BaseException as error:
        fail(begun, error)
        raise
    finally:
        detach(token)
        begun.end()


def fail(begun: Span, error: BaseException) -> None:
    begun.set_attribute(names.ERROR_TYPE, names.error_type(error))
    begun.set_status(Status(StatusCode.ERROR, str(error) or names.error_type(error)))
    # Those are instructions; where they were raised tells nothing.
    if not isinstance(error, Retry | Reject):
        begun.record_exception(error)
