"""uvicorn inside our process, with bounds on requests before authentication. Needs the extra `server`."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pgmb.server import Application
from pgmb.services.http_settings import HttpSettings

HEAD_BYTES: Final = 64 << 10
"""Of a request's line and headers."""
HEAD_FIELDS: Final = 200
HALF_OPEN_CONNECTIONS: Final = 512
"""Connections whose request's head has not arrived: beyond that the oldest of them is closed."""
BODY_WITHIN_SECONDS: Final = 60.0
"""Seconds that a body may take to arrive."""
LINGER_SECONDS: Final = 2.0
LINGER_BYTES: Final = 1 << 20
"""After refusing a head that is too large, the server reads and discards up to this much. Closing at once
would reset the connection before the client has read the answer."""


class Server(uvicorn.Server):
    """Leaves signals to the process it runs in: the other services need them, too."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def allow_connections() -> None:
    """Take as many open files as this process may have: each connection is one."""
    with suppress(ImportError, OSError, ValueError):
        # Not on every system.
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spare_the_collector() -> None:
    """Look for garbage less often: thousands of connections are many objects, which all stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def configure(application: Application, settings: HttpSettings, keep_alive: int) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=limited(settings.head_within),
        # It is started and closed by the service, and logs requests itself.
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=settings.proxy_headers,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=max(1, round(settings.finish_within)),
    )


def limited(head_within: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol for one server, where a request's head must arrive within `head_within` seconds."""
    return type("LimitedProtocol", (_Limited,), {"head_within": head_within, "half_open": {}})


class _Limited(HttpToolsProtocol):
    """A connection waits for a head, then for a body, then for nothing. The first two have an end."""

    head_within: ClassVar[float]
    half_open: ClassVar[dict[_Limited, None]]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._in_head = False
        self._head = 0
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
        # The parser keeps a field until all of it is there.
        self._head += len(data)
        if self._refused:
            if self._head > LINGER_BYTES:
                self.transport.abort()
        elif self._in_head and self._head > HEAD_BYTES:
            self.refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES or len(self.headers) > HEAD_FIELDS:
            self.refuse_head()
            return
        self._wait_no_more()
        self._timer = self.loop.call_later(BODY_WITHIN_SECONDS, self.transport.abort)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._wait_no_more()
        if not self._refused:
            super().on_message_complete()

    def _wait_for_head(self) -> None:
        if self._in_head:
            return
        self._wait_no_more()
        self._in_head, self._head = True, 0
        self._timer = self.loop.call_later(self.head_within, self.refuse, 408)
        self.half_open[self] = None
        if len(self.half_open) > HALF_OPEN_CONNECTIONS:
            next(iter(self.half_open)).refuse(503)

    def _wait_no_more(self) -> None:
        self._in_head = False
        self.half_open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refuse_head(self) -> None:
        self._answer(431)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()

    def refuse(self, status: int) -> None:
        self._answer(status)
        self.transport.close()

    def _answer(self, status: int) -> None:
        self._wait_no_more()
        self._refused = True
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
