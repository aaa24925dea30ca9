"""Trace context in the headers of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard, cast

import msgspec
from opentelemetry import propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.propagators.textmap import Setter, TextMapPropagator
from opentelemetry.trace import SpanContext

from pgmb._core import wire
from pgmb.types import Event


class _Setter(Setter[dict[str, str]]):
    def set(self, carrier: dict[str, str], key: str, value: str) -> None:
        carrier[key] = value


_SETTER = _Setter()


class Propagation:
    """Puts the current context into headers and takes it out, by the propagator given or the global one."""

    def __init__(self, propagator: TextMapPropagator | None = None) -> None:
        self._propagator = propagator
        self._last: tuple[dict[str, str], Context] = ({}, Context())

    def injected(self, headers: Any) -> Any:
        """The headers with the current context, as a new object. What they had already stays as it is.

        Headers that are not a JSON object are returned untouched.
        """
        carrier: dict[str, str] = {}
        self._current.inject(carrier, setter=_SETTER)
        if not carrier:
            return headers
        if headers is None:
            return carrier
        if _is_dict(headers):
            return {**headers, **{name: value for name, value in carrier.items() if name not in headers}}
        encoded = wire.json(headers)
        decoded = _object(encoded)
        if decoded is None:
            return headers
        added = {name: value for name, value in carrier.items() if name not in decoded}
        if not decoded:
            return added
        # The given JSON text unchanged, then the rest.
        return msgspec.Raw(encoded.rstrip()[:-1] + b"," + wire.json(added)[1:]) if added else headers

    def created(self, headers: Any) -> SpanContext | None:
        """The context under which an event with these headers was created, if they say."""
        if headers is None:
            return None
        given = headers if _is_dict(headers) else _object(wire.json(headers))
        return _span_of(self._extracted(given))

    def created_of(self, event: Event) -> SpanContext | None:
        return _span_of(self._extracted(_headers(event)))

    def context_of(self, event: Event) -> Context:
        """The current context, with what the event's headers bring: its trace and its baggage."""
        return Context({**get_current(), **self._extracted(_headers(event))})

    def _extracted(self, headers: Mapping[Any, Any] | None) -> Context:
        carrier = {name: value for name, value in (headers or {}).items() if isinstance(value, str)}
        last, context = self._last
        # Events that were published together have the same: reading it costs ten times comparing it.
        if carrier != last:
            context = self._current.extract(carrier, Context())
            self._last = (carrier, context)
        return context

    @property
    def _current(self) -> TextMapPropagator:
        return self._propagator or propagate.get_global_textmap()


def _span_of(context: Context) -> SpanContext | None:
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def _headers(event: Event) -> Mapping[str, Any] | None:
    # Anybody may publish through SQL: the headers need not be an object.
    headers = cast("object", event.headers)
    return cast("dict[str, Any]", headers) if isinstance(headers, dict) else None


def _is_dict(headers: Any) -> TypeGuard[dict[str, Any]]:
    return type(headers) is dict


def _object(encoded: bytes) -> dict[str, Any] | None:
    decoded = msgspec.json.decode(encoded)
    return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else None
