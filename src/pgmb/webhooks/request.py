"""Webhook requests: body, headers and signature, for one event or a batch. No I/O.

A single event is sent as its payload, byte for byte, with CloudEvents 1.0 attributes in headers (binary
mode), or as a CloudEvents document (structured mode). An endpoint with batches always gets a JSON array.

Signatures cover the body before compression: Standard Webhooks signs the content, and receivers undo a
content-encoding before their code verifies the signature.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from importlib.metadata import version
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

import msgspec

from pgmb.errors import InvalidArgument
from pgmb.webhooks.secrets import Secret, sign

USER_AGENT = f"pgmb/{version('pgmb')}"

_RESERVED = frozenset({"accept-encoding", "content-encoding", "content-type", "idempotency-key"})
_RESERVED_PREFIXES = ("ce-", "pgmb-", "webhook-")
# They control the connection or the message framing: a wrong value would break or smuggle requests.
_CONNECTION_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_MOST_HEADERS, _LONGEST_HEADERS = 50, 8192


def check_headers(headers: Mapping[str, object]) -> dict[str, str]:
    """Validate an endpoint's own headers, and lower their names. Raises InvalidArgument."""
    checked: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise _invalid_header(f"{name[:100]!r} is no name of a header")
        if lower in _RESERVED or lower.startswith(_RESERVED_PREFIXES):
            raise _invalid_header(f"the header {lower} is pgmb's own")
        if lower in _CONNECTION_HEADERS or lower.startswith("proxy-"):
            raise _invalid_header(f"the header {lower} belongs to the connection")
        if lower in checked:
            raise _invalid_header(f"the header {lower} is given twice")
        # The value may be a password: errors do not quote it.
        if not isinstance(value, str) or any(unicodedata.category(letter)[0] == "C" for letter in value):
            raise _invalid_header(f"the value of the header {lower} is no text, or has control characters")
        checked[lower] = value.strip(" ")
    if (
        len(checked) > _MOST_HEADERS
        or sum(map(len, checked)) + sum(map(len, checked.values())) > _LONGEST_HEADERS
    ):
        raise _invalid_header(
            f"an endpoint adds at most {_MOST_HEADERS} headers, of {_LONGEST_HEADERS} characters together"
        )
    return checked


class _PercentEncoded(dict[int, str]):
    def __missing__(self, letter: int) -> str:
        return "".join(f"%{byte:02X}" for byte in chr(letter).encode())


_PLAIN = re.compile(r"[!#$&-~]*").fullmatch
_ENCODED = _PercentEncoded({letter: chr(letter) for letter in range(0x21, 0x7F) if chr(letter) not in '"%'})
_ENCODED.update({letter: f"%{letter:02X}" for letter in (*range(0x21), ord('"'), ord("%"), 0x7F)})


def percent_encoded(text: str) -> str:
    """Encode a header value as CloudEvents requires: spaces, quotes, percent signs and non-ASCII."""
    return text if _PLAIN(text) else text.translate(_ENCODED)


def _invalid_header(said: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise("An endpoint adds headers of its own, such as authorization or x-tenant.")
    return error


class WebhookEvent(NamedTuple):
    """An event to post. Payload and headers are JSON text and are not parsed."""

    id: str
    topic: str
    key: str | None
    payload: str
    headers: str | None
    published_at: datetime


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint's settings. Invalid headers raise InvalidArgument.

    The repr leaves out the secrets, and the url and headers, which may contain some.
    """

    id: UUID
    name: str
    url: str = field(repr=False)
    body: Literal["payload", "cloudevents"] = "payload"
    batch: int = 1
    timeout: float = 15.0
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    gzip_above: int | None = None
    keep_response: bool = False
    retry_after: tuple[float, ...] | None = None
    """Seconds to wait after each failure; None: the queue's own schedule."""
    rps: float | None = None
    max_in_flight: int = 16
    source: str = "/pgmb"
    """The CloudEvents source, a URI reference."""
    fixed: dict[str, str] = field(init=False, repr=False, compare=False)
    """The headers that all its requests have in common."""

    def __post_init__(self) -> None:
        # aiohttp adds its own accept and user-agent headers where they are missing.
        defaults = {"accept": "*/*", "user-agent": USER_AGENT}
        fixed = {**defaults, **check_headers(self.headers), "accept-encoding": "identity"}
        if self.batch == 1 and self.body == "payload":
            fixed |= {"ce-specversion": "1.0", "ce-source": percent_encoded(self.source)}
        object.__setattr__(self, "fixed", fixed)


Serialiser: TypeAlias = Callable[[Endpoint, Sequence[WebhookEvent]], tuple[bytes, str]]
"""Returns a body and its content type."""

# Common servers refuse longer header lines. The event's headers are then left out.
_LONGEST_HEADER = 4096
_GZIP_WBITS = 31
_GZIP_LEVEL = 5

_json = msgspec.json.Encoder().encode


class Request(NamedTuple):
    """A POST request. The repr hides the url and the headers, which may hold passwords."""

    url: str
    body: bytes
    headers: dict[str, str]

    def __repr__(self) -> str:
        return f"Request({len(self.body)} bytes)"


def build_request(
    endpoint: Endpoint,
    events: Sequence[WebhookEvent],
    attempt: int,
    timestamp: int,
    serialise: Serialiser | None = None,
) -> Request:
    """Build and sign the request for these events. `timestamp` is the time of signing, in seconds."""
    headers = endpoint.fixed.copy()
    if endpoint.batch == 1:
        (event,) = events
        message = event.id
        if serialise is not None:
            body, headers["content-type"] = serialise(endpoint, events)
        elif endpoint.body == "payload":
            body, headers["content-type"] = event.payload.encode(), "application/json"
        else:
            body, headers["content-type"] = _document(endpoint, event), "application/cloudevents+json"
        if endpoint.body == "payload":
            _add_event_headers(headers, event)
    else:
        message = message_id(events)
        headers["webhook-batch-size"] = str(len(events))
        if serialise is not None:
            body, headers["content-type"] = serialise(endpoint, events)
        elif endpoint.body == "payload":
            body = f"[{','.join([event.payload for event in events])}]".encode()
            headers["content-type"] = "application/json"
        else:
            body = b"[%b]" % b",".join([_document(endpoint, event) for event in events])
            headers["content-type"] = "application/cloudevents-batch+json"
    headers["idempotency-key"] = headers["webhook-id"] = message
    headers["webhook-timestamp"] = str(timestamp)
    headers["pgmb-attempt"] = str(attempt)
    if endpoint.secrets:
        headers["webhook-signature"] = sign(endpoint.secrets, message, timestamp, body)
    if endpoint.gzip_above is not None and len(body) > endpoint.gzip_above:
        headers["content-encoding"] = "gzip"
        body = zlib.compress(body, _GZIP_LEVEL, _GZIP_WBITS)
    return Request(endpoint.url, body, headers)


def message_id(events: Sequence[WebhookEvent]) -> str:
    """The `webhook-id`: the event's id, or a hash of the batch's ids. It is the same at every attempt."""
    if len(events) == 1:
        return events[0].id
    return "batch_" + sha256("\n".join([event.id for event in events]).encode()).hexdigest()[:32]


def _add_event_headers(headers: dict[str, str], event: WebhookEvent) -> None:
    """Add the CloudEvents headers (binary mode) that differ by event."""
    headers["ce-id"] = event.id
    headers["ce-type"] = percent_encoded(event.topic)
    headers["ce-time"] = event.published_at.isoformat()
    if event.key:
        headers["ce-partitionkey"] = percent_encoded(event.key)
    if event.headers is not None:
        encoded = percent_encoded(event.headers)
        if len(encoded) <= _LONGEST_HEADER:
            headers["ce-pgmbheaders"] = encoded


def _document(endpoint: Endpoint, event: WebhookEvent) -> bytes:
    """A CloudEvents document (structured mode). The payload is inserted as JSON text, unparsed."""
    key = b"" if not event.key else b',"partitionkey":' + _json(event.key)
    more = b"" if event.headers is None else b',"pgmbheaders":' + _json(event.headers)
    return (
        b'{"specversion":"1.0","id":%b,"source":%b,"type":%b,"time":%b%b%b'
        b',"datacontenttype":"application/json","data":%b}'
        % (
            _json(event.id),
            _json(endpoint.source),
            _json(event.topic),
            _json(event.published_at.isoformat()),
            key,
            more,
            event.payload.encode(),
        )
    )
