"""Judges responses, schedules retries, and trips the circuit breaker. No I/O."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple, TypeAlias

import aiohttp
from aiohttp import http_exceptions

from pgmb.errors import AddressRefused, InvalidArgument

OutcomeKind: TypeAlias = Literal["delivered", "refused", "failed", "throttled", "gone", "unsent"]
"""`refused` is about the message, `failed` about its receiver, `unsent` about this process."""

SHORTEST_WAIT, LONGEST_WAIT = 1.0, 86_400.0

_GONE = 410
_THROTTLING = frozenset({429, 502, 503, 504})
_OF_THE_RECEIVER = frozenset({401, 403, 404, 408})
"""Client errors about the receiver's configuration or load. All others are about the message."""
_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_OURS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EADDRINUSE}
)
"""Files, memory and local addresses that this process has not got."""
_TLS = (ssl.SSLError, ssl.CertificateError, aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)


class ResponseTooLarge(aiohttp.ClientError):
    """A server sent more than a response may have."""


class Verdict(NamedTuple):
    """The outcome of a request."""

    kind: OutcomeKind
    error_class: str | None = None
    """The kind of failure; None on success."""
    retry_after: float | None = None
    """Seconds to wait, if a throttled response had a Retry-After."""


def judge(
    status: int | None, headers: Mapping[str, str], error: BaseException | None, now: datetime
) -> Verdict:
    """Judge a request. A status decides alone: an error while reading the rest changes nothing."""
    if status is None:
        if error is not None and is_ours(error):
            return Verdict("unsent", "local_resources")
        return Verdict("failed", "protocol" if error is None else classify(error))
    if 200 <= status < 300:
        return _DELIVERED
    if status == _GONE:
        return Verdict("gone", "http_410")
    if status in _THROTTLING:
        return Verdict("throttled", f"http_{status}", retry_after(headers.get("Retry-After"), now))
    if 300 <= status < 400:
        return Verdict("failed", "redirect")
    if 400 <= status < 500 and status not in _OF_THE_RECEIVER:
        return Verdict("refused", f"http_{status}")
    return Verdict("failed", f"http_{status}")


_DELIVERED = Verdict("delivered")


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds from a Retry-After header, between one second and one day; None if it is not valid."""
    if value is None:
        return None
    value = value.strip()
    if _SECONDS.fullmatch(value):
        return _clamped(float(value))
    try:
        when = parsedate_to_datetime(value)
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        return _clamped((when - now).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def is_ours(error: BaseException) -> bool:
    """Whether this process lacked something to send a request: it says nothing of the receiver."""
    seen: set[int] = set()
    causes: list[BaseException | None] = [error]
    while causes:
        one = causes.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno in _OURS):
            return True
        causes += [one.__cause__, one.__context__, getattr(one, "os_error", None)]
    return False


def classify(error: BaseException) -> str:
    """The class of an error, for the log and the metrics.

    `invalid_url`, `refused_address`, `dns`, `connect`, `proxy`, `tls`, `timeout`, `disconnected`, `too_large`
    (headers, interim responses), `protocol`, or `internal` (a bug in pgmb).
    """
    if isinstance(error, InvalidArgument | aiohttp.InvalidURL):
        return "invalid_url"
    if _is_refused_address(error):
        return "refused_address"
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "dns"
    if isinstance(error, _TLS):
        return "tls"
    if isinstance(error, aiohttp.ClientProxyConnectionError | aiohttp.ClientHttpProxyError):
        return "proxy"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
        return "disconnected"
    if isinstance(error, aiohttp.ClientError | http_exceptions.HttpProcessingError):
        return "too_large" if _is_too_large(error) else "protocol"
    return "internal"


def describe(error: BaseException) -> str:
    """A short text without any part of the url, the headers or the response, which may hold secrets."""
    if isinstance(error, InvalidArgument | AddressRefused):
        return str(error)
    if isinstance(error, aiohttp.InvalidURL):
        return "the url's host is neither a name nor an address"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        certificate = error.certificate_error
        return getattr(certificate, "verify_message", "") or type(certificate).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        return cause.said if isinstance(cause, AddressRefused) else cause.strerror or type(cause).__name__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


def _is_refused_address(error: BaseException) -> bool:
    if isinstance(error, aiohttp.ClientConnectorError):
        # If several addresses were refused, aiohttp raises one OSError with their common errno.
        return isinstance(error.os_error, AddressRefused) or error.os_error.errno == errno.EACCES
    return isinstance(error, AddressRefused)


def _is_too_large(error: BaseException) -> bool:
    if isinstance(error, ResponseTooLarge):
        return True
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, http_exceptions.LineTooLong):
        cause = cause.__cause__
    return cause is not None


def _clamped(seconds: float) -> float:
    return min(max(seconds, SHORTEST_WAIT), LONGEST_WAIT)


MINUTE, HOUR = 60.0, 3600.0

DEFAULT_SCHEDULE = (
    0.0,
    5.0,
    5 * MINUTE,
    30 * MINUTE,
    2 * HOUR,
    5 * HOUR,
    10 * HOUR,
    14 * HOUR,
    20 * HOUR,
    24 * HOUR,
)
"""The schedule that Standard Webhooks recommends: eleven attempts within a little over three days."""

_JITTER = 0.2


def delay_after(schedule: Sequence[float], attempt: int, random: Callable[[], float]) -> float | None:
    """Seconds to wait after a failed attempt, counted from 1; None after the last one.

    `random` returns numbers from 0 up to 1. Jitter of 20 % keeps deliveries that failed together from being
    retried together.
    """
    if attempt > len(schedule):
        return None
    return jittered(schedule[attempt - 1], random)


def jittered(delay: float, random: Callable[[], float]) -> float:
    """The delay with up to 20 % jitter."""
    return delay * (1 - _JITTER + 2 * _JITTER * random())


WINDOW_SECONDS = 60.0
MIN_FAILURES = 5
MIN_FAILURE_RATIO = 0.5

_BUCKETS = 12
_BUCKET_SECONDS = WINDOW_SECONDS / _BUCKETS


class CircuitBreaker:
    """Trips when at least 5 events failed within a minute, and no more succeeded. It stays tripped.

    An event that fails at several attempts counts once. The breaker only decides whether an endpoint fails.
    Dispatchers agree on the consequences in the database, through `pgmb.trip_endpoint` and
    `pgmb.probe_endpoint`. Outcomes are counted in 12 buckets, so that recording has a constant cost.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.tripped = False
        self._clock = clock
        self._bucket = int(clock() // _BUCKET_SECONDS)
        self._delivered = [0] * _BUCKETS
        self._successes = 0
        self._failed: dict[str, int] = {}
        """The bucket of each event's last failure, the oldest first."""

    def succeeded(self) -> None:
        """Record a request that was answered as it should be."""
        self._advance()
        self._delivered[self._bucket % _BUCKETS] += 1
        self._successes += 1

    def failed(self, event: str) -> None:
        """Record the failed request of an event, or of the batch that begins with it."""
        self._advance()
        self._failed.pop(event, None)
        self._failed[event] = self._bucket
        failures = len(self._failed)
        if failures >= MIN_FAILURES and failures >= MIN_FAILURE_RATIO * (failures + self._successes):
            self.tripped = True

    def _advance(self) -> None:
        """Clear the buckets that are older than the window."""
        current = int(self._clock() // _BUCKET_SECONDS)
        if current <= self._bucket:
            return
        for passed in range(max(self._bucket + 1, current - _BUCKETS + 1), current + 1):
            bucket = passed % _BUCKETS
            self._successes -= self._delivered[bucket]
            self._delivered[bucket] = 0
        self._bucket = current
        for event, bucket in list(self._failed.items()):
            if bucket > current - _BUCKETS:
                break
            del self._failed[event]
