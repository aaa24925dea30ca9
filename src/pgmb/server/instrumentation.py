"""Request ids, counts, durations and the access log."""

from __future__ import annotations

import logging
import re
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUCKET_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds. A long poll may take most of a minute."""

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class Histogram:
    """Durations by bucket, not cumulative."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECONDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as Prometheus expects them."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*BUCKET_SECONDS, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return found


@dataclass(slots=True)
class Counters:
    """Counts since the application started, for /metrics. Used by one event loop only."""

    requests: dict[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])
    """By route, method and status class."""
    durations: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    """By route, until the response was sent; for server-sent events until it began."""
    in_progress: int = 0

    sse_clients: int = 0
    """Currently connected."""
    sse_events: int = 0
    """Sent to all clients."""
    sse_bytes: int = 0
    sse_dropped: int = 0
    """Clients disconnected for being too slow."""
    sse_resumed: int = 0
    """Clients that reconnected with a resume token."""
    sse_reset: int = 0
    """Clients whose resume token was too old."""
    sse_replayed: int = 0
    """Events sent again to reconnected clients."""

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a finished request. Status 0: the client disconnected before the response."""
        known = method if method in METHODS else "OTHER"
        which = (route, known, f"{status // 100}xx" if status else "aborted")
        self.requests[which] = self.requests.get(which, 0) + 1
        self.durations.setdefault(route, Histogram()).add(seconds)


UNMATCHED: Final = "unmatched"


class RouteTemplates:
    """The path templates of an application's routes, mounted ones included.

    Requests are counted by template: a path would make an unbounded number of metrics.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_endpoint: dict[Any, list[tuple[str, BaseRoute]]] = {}
        self._add(routes, "")

    def _add(self, routes: Iterable[BaseRoute], prefix: str) -> None:
        for route in routes:
            if isinstance(route, Route):
                self._by_endpoint.setdefault(route.endpoint, []).append((prefix + route.path, route))
            elif isinstance(route, Mount):
                self._by_endpoint.setdefault(route.app, []).append((f"{prefix}{route.path}/…", route))
                self._add(route.routes or (), prefix + route.path)

    def of(self, scope: Scope) -> str:
        """The template of a routed request, found by the endpoint that routing left in the scope."""
        found = self._by_endpoint.get(scope.get("endpoint"))
        if found is None:
            return UNMATCHED
        if len(found) > 1:
            for template, route in found:
                if route.matches(scope)[0] is not Match.NONE:
                    return template
        return found[0][0]


logger = logging.getLogger("pgmb.access")

REQUEST_ID: Final = "pgmb.request_id"
"""The key of the request id in the scope."""
KEY_NAME: Final = "pgmb.key_name"
"""The key in the scope under which Access stores the API key's name."""

_REQUEST_ID_FORMAT: Final = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_QUIET_ROUTES: Final = frozenset({"/livez", "/readyz", "/metrics"})
"""Polled by monitoring: logged at INFO only when they fail."""


class Instrumentation:
    """ASGI middleware. It does not buffer bodies: events pass through as they are sent."""

    def __init__(self, app: ASGIApp, counts: Counters, templates: RouteTemplates) -> None:
        self._app = app
        self._counts = counts
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = request_id = given if _REQUEST_ID_FORMAT.fullmatch(given) else uuid4().hex
        began = time.perf_counter()
        answer = _Response(send, request_id)
        self._counts.in_progress += 1
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._counts.in_progress -= 1
            ended = time.perf_counter()
            route = self._templates.of(scope)
            lasted = (answer.began_at if answer.is_stream else ended) - began
            self._counts.count(route, scope["method"], answer.status, lasted)
            self._log(scope, route, answer, ended - began)

    def _log(self, scope: Scope, route: str, answer: _Response, seconds: float) -> None:
        level = logging.DEBUG if route in _QUIET_ROUTES and 200 <= answer.status < 300 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": client[0] if client else None,
            "method": scope["method"],
            "route": route,
            "status": answer.status,
            "seconds": round(seconds, 6),
            # Most bytes of an event stream bypass this middleware: see DIRECT_SEND.
            "bytes": None if answer.is_stream else answer.bytes,
            "key": scope.get(KEY_NAME),
            "request_id": scope[REQUEST_ID],
        }
        logger.log(
            level,
            "%s %s %s %d, %.1f ms, %s bytes, key %s, request %s",
            fields["client"] or "-",
            _printable(fields["method"]),
            route,
            answer.status,
            seconds * 1000,
            "-" if fields["bytes"] is None else fields["bytes"],
            fields["key"] or "-",
            fields["request_id"],
            extra={"fields": fields},
        )


class _Response:
    """Observes a response while it is sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0
        self.bytes = 0
        self.is_stream = False
        self.began_at = 0.0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.began_at = time.perf_counter()
            headers = MutableHeaders(scope=message)
            self.is_stream = headers.get("content-type", "").startswith("text/event-stream")
            headers["X-Request-Id"] = self._request_id
        elif message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
        await self._send(message)


def _printable(method: str) -> str:
    return method if method.isalnum() else "?"
