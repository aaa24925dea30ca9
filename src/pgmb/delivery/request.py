"""What is posted: the body and its headers, for one event or a batch of them. No I/O.

A single event is its payload to the letter, with CloudEvents 1.0 in headers (binary mode), or a CloudEvents
document (structured mode). An endpoint that takes batches always gets an array, of payloads or of documents.

Signatures cover the body before compression: Standard Webhooks signs the content, and a content-encoding is
undone by what receives the request, before the receiver's code verifies it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import msgspec

from pgmb.delivery.endpoint import Endpoint, Posted
from pgmb.delivery.headers import check_headers, percent_encoded
from pgmb.delivery.signature import sign

__all__ = ["Request", "Serialiser", "build", "check_headers", "message_id"]

Serialiser: TypeAlias = Callable[[Endpoint, Sequence[Posted]], tuple[bytes, str]]
"""Makes the body and its content type."""

# A header longer than this is refused by common servers: the event's headers are then left out.
_LONGEST_HEADER = 4096
_GZIP = 31
_LEVEL = 5

_json = msgspec.json.Encoder().encode


class Request(NamedTuple):
    """A POST."""

    url: str
    body: bytes
    headers: dict[str, str]

    def __repr__(self) -> str:
        # The url and the headers may hold passwords.
        return f"Request({len(self.body)} bytes)"


def build(
    endpoint: Endpoint,
    events: Sequence[Posted],
    attempt: int,
    timestamp: int,
    serialise: Serialiser | None = None,
) -> Request:
    """The request that posts events; `timestamp`, in seconds, is when it is signed."""
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
            _describe(headers, event)
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
        body = zlib.compress(body, _LEVEL, _GZIP)
    return Request(endpoint.url, body, headers)


def message_id(events: Sequence[Posted]) -> str:
    """The `webhook-id`: the only event's, or derived from theirs. It is the same at every attempt."""
    if len(events) == 1:
        return events[0].id
    return "batch_" + sha256("\n".join([event.id for event in events]).encode()).hexdigest()[:32]


def _describe(headers: dict[str, str], event: Posted) -> None:
    """CloudEvents in binary mode, but for what the endpoint's fixed headers hold."""
    headers["ce-id"] = event.id
    headers["ce-type"] = percent_encoded(event.topic)
    headers["ce-time"] = event.published_at.isoformat()
    if event.key:
        headers["ce-partitionkey"] = percent_encoded(event.key)
    if event.headers is not None:
        encoded = percent_encoded(event.headers)
        if len(encoded) <= _LONGEST_HEADER:
            headers["ce-pgmbheaders"] = encoded


def _document(endpoint: Endpoint, event: Posted) -> bytes:
    """CloudEvents in structured mode, the payload put in as the text it is."""
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
