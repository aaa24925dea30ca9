"""What became of a request: delivered, failed, to be left alone for a while, or gone. No I/O."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple, TypeAlias

import aiohttp
from aiohttp import http_exceptions

from pgmb.errors import AddressRefused, InvalidArgument

Kind: TypeAlias = Literal["delivered", "failed", "throttled", "gone"]

SHORTEST_WAIT, LONGEST_WAIT = 1.0, 86_400.0

_GONE = 410
_THROTTLING = frozenset({429, 502, 503, 504})
_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
_TLS = (ssl.SSLError, ssl.CertificateError, aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)


class Verdict(NamedTuple):
    """What is to be done about a request that ended."""

    kind: Kind
    error_class: str | None = None
    """What went wrong, in a word; None where nothing did."""
    retry_after: float | None = None
    """Of one that is throttled: in how many seconds the endpoint wants to be asked again, if it said so."""


def judge(
    status: int | None, headers: Mapping[str, str], error: BaseException | None, now: datetime
) -> Verdict:
    """Judge by the status where there is one: what went wrong after it arrived changes nothing."""
    if status is None:
        return Verdict("failed", "protocol" if error is None else classify(error))
    if 200 <= status < 300:
        return _DELIVERED
    if status == _GONE:
        return Verdict("gone", "http_410")
    if status in _THROTTLING:
        return Verdict("throttled", f"http_{status}", retry_after(headers.get("Retry-After"), now))
    if 300 <= status < 400:
        return Verdict("failed", "redirect")
    return Verdict("failed", f"http_{status}")


_DELIVERED = Verdict("delivered")


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds that a Retry-After header asks for, within a second and a day; None if it says nothing."""
    if value is None:
        return None
    value = value.strip()
    if _SECONDS.fullmatch(value):
        return _clamped(float(value))
    try:
        moment = parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return _clamped((moment - now).total_seconds())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def classify(error: BaseException) -> str:
    """What went wrong, in a word.

    `invalid_url`, `refused_address`, `dns`, `connect`, `proxy`, `tls`, `timeout`, `disconnected`, `too_large`
    (headers), `protocol`, or `internal`, which is a mistake of ours.
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
    """What went wrong, in a few words of which none came from the url, the headers or the response."""
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
        # Where several addresses were refused, aiohttp raises one error with their number instead of them.
        return isinstance(error.os_error, AddressRefused) or error.os_error.errno == errno.EACCES
    return isinstance(error, AddressRefused)


def _is_too_large(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, http_exceptions.LineTooLong):
        cause = cause.__cause__
    return cause is not None


def _clamped(seconds: float) -> float:
    return min(max(seconds, SHORTEST_WAIT), LONGEST_WAIT)
