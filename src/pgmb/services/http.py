"""Http serves the HTTP side: REST, server-sent events, the dashboard, and what operators ask."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from pgmb._async.broker import AsyncBroker
from pgmb.errors import InvalidArgument
from pgmb.services.http_settings import HttpSettings

if TYPE_CHECKING:
    from prometheus_client import Metric

    from pgmb.server import Application
    from pgmb.services.http_server import Server

_BACKLOG = 2048
_UNTAKEN_MILLISECONDS = 30_000


class Http:
    """Any number may run, on one port each. Needs the extra `server`."""

    name = "http"

    def __init__(
        self,
        dsn: str = "",
        settings: HttpSettings | None = None,
        hung: Callable[[], Sequence[str]] = tuple,
        families: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        """`hung` names what makes no progress, for /livez; /metrics shows `families`, too."""
        self._hung = hung
        self._families = families
        self.dsn = dsn
        self._settings = settings or HttpSettings()
        self._socket: socket.socket | None = None
        self._application: Application | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self) -> str:
        """Take the port, and return where it is: clients that connect now wait until the service runs."""
        if self._socket is None:
            _check_certificate(self._settings.ssl_certfile, self._settings.ssl_keyfile)
            self._socket = _listening(self._settings.host, self._settings.port)
        return self.url

    def release(self) -> None:
        """Close this process's copy of the port, which another process serves."""
        if self._socket is not None:
            self._socket.close()

    @property
    def url(self) -> str:
        """Where it serves."""
        port = self._settings.port if self._socket is None else self._socket.getsockname()[1]
        scheme = "https" if self._settings.ssl_certfile else "http"
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{scheme}://{host}:{port}"

    async def turn(self, broker: AsyncBroker) -> float:
        if self._serving is None:
            await self._open()
        elif self._serving.done():
            # It ends when it is told to, and for no other reason.
            error = None if self._serving.cancelled() else self._serving.exception()
            raise RuntimeError("the HTTP server ended unexpectedly") from error
        return 1.0

    async def close(self, broker: AsyncBroker) -> None:
        """Send away who stays, wait for requests under way, then end."""
        try:
            await self._end(self._settings.drain_for)
        finally:
            if self._socket is not None:
                self._socket.close()

    async def restart(self, broker: AsyncBroker) -> None:
        """End what is left after an error. The port stays: clients wait until the next turn serves again."""
        await self._end(0.0)

    async def _end(self, drain_for: float) -> None:
        application, self._application = self._application, None
        server, self._server = self._server, None
        serving, self._serving = self._serving, None
        if application is None or server is None or serving is None:
            return
        try:
            await application.drain()
            await asyncio.wait({serving}, timeout=drain_for)
            await server.stop()
            serving.cancel()
            await asyncio.wait({serving}, timeout=1)
        finally:
            await application.close()

    async def _open(self) -> None:
        # What serving needs is an extra.
        from pgmb.server import create_app
        from pgmb.services.http_server import Server, spare_the_collector

        given = self._settings
        self.bind()
        application = create_app(
            self.dsn,
            metrics_public=given.metrics_public,
            max_size=given.connections,
            hung=self._hung,
            families=self._families,
        )
        await application.start()
        self._application = application
        spare_the_collector()
        self._server = Server(application, given)
        assert self._socket is not None  # noqa: S101
        listening = self._socket.dup()
        self._serving = asyncio.create_task(self._server.serve(listening), name="http server")


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        if sys.platform == "linux":
            # Accepted connections inherit it. It ends those whose peer is gone or takes nothing, even if what
            # it should take is in a buffer of TLS, whose size the server cannot see.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MILLISECONDS)
    except OSError as error:
        refused = InvalidArgument(f"cannot listen on {host} port {port}: {error.strerror or error}")
        refused.advise("Another process may use it. Choose another with --port; 0 selects a free one.")
        raise refused from error
    found.setblocking(False)
    return found


def _check_certificate(certificate: str | None, key: str | None) -> None:
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        refused = InvalidArgument(f"cannot use {certificate}: {error}")
        refused.advise(
            "--ssl-certfile and --ssl-keyfile must be PEM files: the certificate chain, and its key."
        )
        raise refused from error
