"""Around every request: its id, how long it took, how it is counted and what the log says of it."""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Final
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgmb.server.counts import Counts
from pgmb.server.templates import Templates

logger = logging.getLogger("pgmb.access")

REQUEST_ID: Final = "pgmb.request_id"
"""Where the scope has it."""
KEY_NAME: Final = "pgmb.key_name"
"""Where Access leaves the name of the key that asked."""

_AN_ID: Final = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_OFTEN: Final = frozenset({"/livez", "/readyz", "/metrics"})
"""Asked all day long: in the log only where they do not say yes."""


class Watching:
    """ASGI middleware, of which nothing waits for a body: events pass through as they are sent."""

    def __init__(self, app: ASGIApp, counts: Counts, templates: Templates) -> None:
        self._app = app
        self._counts = counts
        self._templates = templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope[REQUEST_ID] = request_id = given if _AN_ID.fullmatch(given) else uuid4().hex
        began = time.perf_counter()
        answer = _Answer(send, request_id)
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

    def _log(self, scope: Scope, route: str, answer: _Answer, seconds: float) -> None:
        level = logging.DEBUG if route in _OFTEN and 200 <= answer.status < 300 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client = scope.get("client")
        fields: dict[str, Any] = {
            "client": client[0] if client else None,
            "method": scope["method"],
            "route": route,
            "status": answer.status,
            "seconds": round(seconds, 6),
            # Most of what a stream sends goes another way: see WAY_OUT.
            "bytes": None if answer.is_stream else answer.bytes,
            "key": scope.get(KEY_NAME),
            "request_id": scope[REQUEST_ID],
        }
        logger.log(
            level,
            "%s %s %s %d, %.1f ms, %s bytes, key %s, request %s",
            fields["client"] or "-",
            _shown(fields["method"]),
            route,
            answer.status,
            seconds * 1000,
            "-" if fields["bytes"] is None else fields["bytes"],
            fields["key"] or "-",
            fields["request_id"],
            extra={"fields": fields},
        )


class _Answer:
    """What is sent, looked at as it passes."""

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


def _shown(method: str) -> str:
    return method if method.isalnum() else "?"
