"""Posting requests: one aiohttp session that trusts nobody."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self, cast

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from pgmb.delivery import outcomes
from pgmb.delivery.addresses import Guard, check_literal, check_url
from pgmb.delivery.deadlines import Deadlines
from pgmb.delivery.request import Request
from pgmb.delivery.resolver import Resolver

_READ = 65_536
_KEPT = 1024
_LARGE = 2**20
_DNS_FOR = 10
# Shorter than common servers wait for the next request: they do not close a connection while it is used.
_IDLE_FOR = 4.0

_checked = lru_cache(maxsize=16_384)(check_url)
_NO_LIMITS = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
# Control characters, but for tab and line ends, and what PostgreSQL's text cannot hold.
_CONTROL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\ufffd")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Attempted(NamedTuple):
    """What became of a request."""

    status: int | None
    """None where nothing came back."""
    latency: float
    error_class: str | None
    detail: str | None
    retry_after: float | None
    response: str | None
    kind: outcomes.Kind


class Poster:
    """Posts requests to where the guard lets it, and reports what came back. It raises cancellation alone.

    Redirects are not followed, cookies not kept, proxies of the environment not used. With `proxy` every
    request goes through that proxy, which is trusted: it resolves the names and has to refuse inner addresses
    itself. Addresses written in urls are refused here all the same. `guard_proxy` has the guard check the
    proxy's own address too.
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
            ttl_dns_cache=_DNS_FOR,
            keepalive_timeout=_IDLE_FOR,
            socket_factory=self._guard.socket_factory if self._guarded else None,
            ssl=True if self._tls is None else self._tls,
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

    async def post(self, request: Request, timeout: float, keep_response: bool) -> Attempted:  # noqa: ASYNC109
        """Post, and wait at most `timeout` seconds for a status, name resolution and connecting included.

        Of the response at most 64 KB are read, and of these 1 KB kept if asked for. Once there is a status it
        decides, whatever becomes of the rest.
        """
        started = perf_counter()
        response: aiohttp.ClientResponse | None = None
        status, headers = None, _NOTHING
        error: Exception | None = None
        kept = bytearray()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._deadlines.begin(task, timeout)
        try:
            url = _checked(request.url)
            if self._proxy is not None:
                check_literal(self._guard, url.raw_host or "")
            response = await self._session.post(
                url,
                data=request.body if len(request.body) <= _LARGE else io.BytesIO(request.body),
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
        except Exception as caught:  # whatever a stranger's server provokes is an outcome of this request
            error = caught
        finally:
            self._deadlines.end(task)
            if response is not None:
                # Where it was not read to its end, this closes the connection.
                response.release()
        latency = perf_counter() - started
        if status is not None and 200 <= status < 300 and not keep_response:
            return Attempted(status, latency, None, None, None, None, "delivered")
        verdict = outcomes.judge(status, headers, error, datetime.now(UTC))
        return Attempted(
            status,
            latency,
            verdict.error_class,
            outcomes.describe(error) if status is None and error is not None else None,
            verdict.retry_after,
            as_text(bytes(kept)) if keep_response and status is not None else None,
            verdict.kind,
        )


async def _drain(content: aiohttp.StreamReader, kept: bytearray) -> None:
    read = 0
    while read < _READ and (chunk := await content.readany()):
        read += len(chunk)
        if len(kept) < _KEPT:
            kept += chunk[: _KEPT - len(kept)]


def as_text(data: bytes) -> str:
    """At most 1 KB of what came back, as text that may be stored and shown anywhere."""
    text = data[:_KEPT].decode("utf-8", "replace").translate(_CONTROL)
    return text.encode()[:_KEPT].decode("utf-8", "ignore")
