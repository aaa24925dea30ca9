"""The HTTP client for webhooks: it never raises for a response, and ends every request in time."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, Self, cast

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from pgmb.webhooks import outcomes
from pgmb.webhooks.egress import Guard, Resolver, check_literal, check_url
from pgmb.webhooks.request import Request

_READ_BYTES = 65_536
_KEPT_BYTES = 1024
_INTERIM_BYTES = 65_536
"""Received before the final status: interim responses (1xx), which aiohttp reads as long as they come."""
_EXCHANGE_BYTES = 2**20
"""Received for one request, or by a connection that waits for its next one."""
_LARGE_BYTES = 2**20
_DNS_SECONDS = 10
# Shorter than common servers' keep-alive timeout, so that they do not close a connection in use.
_IDLE_SECONDS = 4.0

_checked_url = lru_cache(maxsize=16_384)(check_url)
_NO_LIMITS = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
# Control characters except tab and line ends. PostgreSQL's text cannot hold NUL.
_CONTROL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\ufffd")
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class AttemptResult(NamedTuple):
    """The result of a request."""

    status: int | None
    """None if there was no response."""
    latency: float
    error_class: str | None
    detail: str | None
    retry_after: float | None
    response: str | None
    kind: outcomes.OutcomeKind


class WebhookClient:
    """Posts requests to addresses that the guard permits. It raises nothing but cancellation.

    It does not follow redirects, store cookies or read proxy settings from the environment. With `proxy`, all
    requests go through that proxy, which resolves the names and must refuse internal addresses itself. IP
    addresses in urls are still checked here. With `guard_proxy`, the guard checks the proxy's address too.
    """

    def __init__(
        self,
        guard: Guard,
        connections: int = 1000,
        proxy: str | None = None,
        *,
        guard_proxy: bool = False,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._guard = guard
        self._connections = connections
        self._proxy = None if proxy is None else URL(proxy)
        self._guarded = proxy is None or guard_proxy
        self._resolver = resolver
        self._tls = tls
        self._deadlines = Deadlines()

    async def __aenter__(self) -> Self:
        self._own_resolver = Resolver() if self._resolver is None else None
        connector = aiohttp.TCPConnector(
            limit=self._connections,
            limit_per_host=0,
            resolver=self._resolver or self._own_resolver,
            ttl_dns_cache=_DNS_SECONDS,
            keepalive_timeout=_IDLE_SECONDS,
            socket_factory=self._guard.socket_factory if self._guarded else None,
            ssl=True if self._tls is None else self._tls,
        )
        connector._factory = cast(  # noqa: SLF001
            "partial[ResponseHandler]", partial(_BoundedResponses, loop=asyncio.get_running_loop())
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=_NO_LIMITS,
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        if self._own_resolver is not None:
            await self._own_resolver.close()

    async def post(self, request: Request, timeout: float, keep_response: bool) -> AttemptResult:  # noqa: ASYNC109
        """Post, and wait up to `timeout` seconds for the status, including name resolution and connecting.

        At most 64 KB of the response are read, and 1 KB is kept with `keep_response`. The status decides the
        outcome, even if reading the body fails.
        """
        started = perf_counter()
        response: aiohttp.ClientResponse | None = None
        status, headers = None, _NO_HEADERS
        error: Exception | None = None
        kept = bytearray()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._deadlines.begin(task, timeout)
        try:
            url = _checked_url(request.url)
            if self._proxy is not None:
                check_literal(self._guard, url.raw_host or "")
            response = await self._session.post(
                url,
                data=request.body if len(request.body) <= _LARGE_BYTES else io.BytesIO(request.body),
                headers=request.headers,
                allow_redirects=False,
                proxy=self._proxy,
            )
            status, headers = response.status, response.headers
            if keep_response or not response.content.is_eof():
                await _drain(response.content, kept)
        except asyncio.CancelledError:
            if not self._deadlines.ended(task):
                raise
            error = TimeoutError()
        except Exception as caught:  # any error that a server provokes is this request's outcome
            error = caught
        finally:
            self._deadlines.end(task)
            if response is not None:
                # Closes the connection unless the response was read completely.
                response.release()
        latency = perf_counter() - started
        if status is not None and 200 <= status < 300 and not keep_response:
            return AttemptResult(status, latency, None, None, None, None, "delivered")
        verdict = outcomes.judge(status, headers, error, datetime.now(UTC))
        return AttemptResult(
            status,
            latency,
            verdict.error_class,
            outcomes.describe(error) if status is None and error is not None else None,
            verdict.retry_after,
            as_text(bytes(kept)) if keep_response and status is not None else None,
            verdict.kind,
        )


class _BoundedResponses(ResponseHandler):
    """A connection that is closed when its server sends more than a response may have.

    The parser would be busy with whatever comes until the request's deadline, and the process with it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._received = 0
        self._answered = False

    def set_response_params(self, *given: Any, **named: Any) -> None:
        self._received, self._answered = 0, False
        super().set_response_params(*given, **named)

    def feed_data(self, data: Any, size: int = 0) -> None:
        status = data[0].code
        self._answered = self._answered or status >= 200 or status == 101
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        # What came before: one read may have the head of a response and much of its body.
        if self._received > (_EXCHANGE_BYTES if self._answered else _INTERIM_BYTES):
            self.set_exception(outcomes.ResponseTooLarge())
            if self.transport is not None:
                self.transport.abort()
            return
        self._received += len(data)
        super().data_received(data)


async def _drain(content: aiohttp.StreamReader, kept: bytearray) -> None:
    read = 0
    while read < _READ_BYTES and (chunk := await content.readany()):
        read += len(chunk)
        if len(kept) < _KEPT_BYTES:
            kept += chunk[: _KEPT_BYTES - len(kept)]


def as_text(data: bytes) -> str:
    """At most 1 KB of a response as text that is safe to store and to show."""
    text = data[:_KEPT_BYTES].decode("utf-8", "replace").translate(_CONTROL)
    return text.encode()[:_KEPT_BYTES].decode("utf-8", "ignore")


_CHECK_EVERY: Final = 0.05


class Deadlines:
    """Cancels tasks that exceed their time limit, at most 50 ms late.

    One timer serves all requests: a timer per request would cost as much as building and signing it.
    """

    def __init__(self) -> None:
        self._until: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Limit a task to this many seconds, until `end`."""
        loop = task.get_loop()
        self._until[task] = loop.time() + seconds
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_EVERY, self._check, loop)

    def end(self, task: asyncio.Task[Any]) -> None:
        self._until.pop(task, None)

    def ended(self, task: asyncio.Task[Any]) -> bool:
        """Whether only the deadline cancelled this task. The cancellation is then taken back."""
        if task not in self._late:
            return False
        self._late.discard(task)
        return task.uncancel() == 0

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for task in [task for task, until in self._until.items() if until <= now]:
            del self._until[task]
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(_CHECK_EVERY, self._check, loop) if self._until else None
