"""Requests: payloads to the letter, CloudEvents around them, ids that outlive attempts, headers."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import unquote
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from pgmb import InvalidArgument
from pgmb.webhooks.request import (
    Endpoint,
    WebhookEvent,
    build_request,
    check_headers,
    message_id,
    percent_encoded,
)
from pgmb.webhooks.secrets import generate_secret, parse_secret

pytestmark = pytest.mark.once

PUBLISHED = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)
PAYLOAD = '{"b" : 1,\n "a": 1.0, "a": "é"}'


def endpoint(**options: Any) -> Endpoint:
    return Endpoint(UUID(int=1), "billing", "https://example.org/hook", **options)


def posted(number: int = 1, **options: Any) -> WebhookEvent:
    given = {"topic": "order.created", "key": "k-1", "payload": PAYLOAD, "headers": None}
    return WebhookEvent(id=str(UUID(int=number)), published_at=PUBLISHED, **(given | options))


def test_one_event_is_its_payload_with_cloudevents_in_headers() -> None:
    request = build_request(endpoint(), [posted()], 3, 1_700_000_000)
    assert request.url == "https://example.org/hook"
    assert request.body == PAYLOAD.encode()
    assert request.headers.pop("user-agent").startswith("pgmb/")
    assert request.headers == {
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "ce-specversion": "1.0",
        "ce-id": "00000000-0000-0000-0000-000000000001",
        "ce-source": "/pgmb",
        "ce-type": "order.created",
        "ce-time": "2026-03-01T12:30:15.250000+00:00",
        "ce-partitionkey": "k-1",
        "idempotency-key": "00000000-0000-0000-0000-000000000001",
        "webhook-id": "00000000-0000-0000-0000-000000000001",
        "webhook-timestamp": "1700000000",
        "pgmb-attempt": "3",
    }


def test_a_structured_event_holds_the_payload_to_the_letter() -> None:
    event = posted(key='a"b', headers='{"source": "web"}')
    request = build_request(endpoint(body="cloudevents", source="/pgmb/orders"), [event], 1, 1)
    assert request.headers["content-type"] == "application/cloudevents+json"
    assert not [name for name in request.headers if name.startswith("ce-")]
    assert PAYLOAD.encode() in request.body
    assert json.loads(request.body) == {
        "specversion": "1.0",
        "id": event.id,
        "source": "/pgmb/orders",
        "type": "order.created",
        "time": "2026-03-01T12:30:15.250000+00:00",
        "partitionkey": 'a"b',
        "pgmbheaders": '{"source": "web"}',
        "datacontenttype": "application/json",
        "data": json.loads(PAYLOAD),
    }


@pytest.mark.parametrize("count", [1, 3])
def test_batches_are_arrays_however_many_there_are(count: int) -> None:
    events = [posted(number, payload=str(number), key=None) for number in range(count)]
    plain = build_request(endpoint(batch=10), events, 1, 1)
    assert plain.body == ("[" + ",".join(str(number) for number in range(count)) + "]").encode()
    assert plain.headers["content-type"] == "application/json"
    documents = build_request(endpoint(batch=10, body="cloudevents"), events, 1, 1)
    assert documents.headers["content-type"] == "application/cloudevents-batch+json"
    assert [document["id"] for document in json.loads(documents.body)] == [event.id for event in events]
    assert all("partitionkey" not in document for document in json.loads(documents.body))
    for request in (plain, documents):
        assert request.headers["webhook-batch-size"] == str(count)
        assert not [name for name in request.headers if name.startswith("ce-")]


def test_more_than_one_event_needs_an_endpoint_that_takes_batches() -> None:
    with pytest.raises(ValueError, match="unpack"):
        build_request(endpoint(), [posted(1), posted(2)], 1, 1)


def test_ids_are_the_same_at_every_attempt_and_of_no_other_batch() -> None:
    batch = [posted(1), posted(2)]
    first, again = (
        build_request(endpoint(batch=5), batch, 1, 1),
        build_request(endpoint(batch=5), batch, 2, 99),
    )
    assert first.headers["webhook-id"] == again.headers["webhook-id"] == first.headers["idempotency-key"]
    others = [[posted(1)], [posted(2)], [posted(2), posted(1)], [posted(1), posted(2), posted(3)]]
    ids = {message_id(events) for events in [batch, *others]}
    assert len(ids) == 5
    assert not any("." in one or " " in one for one in ids)


@pytest.mark.parametrize("body", ["payload", "cloudevents"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("gzip_above", [None, 0])
def test_the_reference_library_verifies_what_a_receiver_gets(
    body: Literal["payload", "cloudevents"], batch: int, gzip_above: int | None
) -> None:
    old, new = generate_secret(), generate_secret()
    secrets = (parse_secret(new), parse_secret(old), parse_secret(generate_secret("v1a")))
    target = endpoint(body=body, batch=batch, gzip_above=gzip_above, secrets=secrets)
    request = build_request(target, [posted(number) for number in range(batch)], 1, int(time.time()))
    assert ("content-encoding" in request.headers) == (gzip_above is not None)
    received = gzip.decompress(request.body) if gzip_above is not None else request.body
    for secret in (old, new):
        Webhook(secret).verify(received, request.headers)


def test_bodies_are_compressed_above_the_size_only() -> None:
    event = posted(payload='"' + "x" * 998 + '"')
    assert "content-encoding" not in build_request(endpoint(gzip_above=1000), [event], 1, 1).headers
    request = build_request(endpoint(gzip_above=999), [event], 1, 1)
    assert request.headers["content-encoding"] == "gzip"
    assert len(request.body) < 100
    assert gzip.decompress(request.body).decode() == event.payload
    assert request.body == build_request(endpoint(gzip_above=999), [event], 2, 9).body


def test_a_serialiser_makes_body_and_type_and_is_signed() -> None:
    def as_text(target: Endpoint, events: Sequence[WebhookEvent]) -> tuple[bytes, str]:
        return f"{target.name}: {events[0].topic}".encode(), "text/plain"

    secret = generate_secret()
    request = build_request(
        endpoint(secrets=(parse_secret(secret),)), [posted()], 1, int(time.time()), as_text
    )
    assert request.body == b"billing: order.created"
    assert request.headers["content-type"] == "text/plain"
    assert request.headers["ce-type"] == "order.created"
    Webhook(secret).verify(request.body, request.headers, json_parse=False)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_becomes_a_header_and_comes_back(text: str) -> None:
    encoded = percent_encoded(text)
    assert all(0x21 <= ord(letter) <= 0x7E and letter != '"' for letter in encoded)
    assert unquote(encoded) == text


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("a.b-c", "a.b-c"),
        ("a b", "a%20b"),
        ('"%"', "%22%25%22"),
        ("Euro €", "Euro%20%E2%82%AC"),
        ("\r\n", "%0D%0A"),
    ],
)
def test_headers_are_encoded_as_cloudevents_has_it(text: str, encoded: str) -> None:
    assert build_request(endpoint(), [posted(key=text)], 1, 1).headers["ce-partitionkey"] == encoded


def test_headers_of_events_travel_unless_they_are_too_long_for_a_header() -> None:
    short = build_request(endpoint(), [posted(headers='{"tenant": "é"}')], 1, 1).headers["ce-pgmbheaders"]
    assert unquote(short) == '{"tenant": "é"}'
    assert (
        "ce-pgmbheaders"
        not in build_request(endpoint(), [posted(headers='"' + "x" * 5000 + '"')], 1, 1).headers
    )


def test_an_endpoint_adds_headers_and_names_the_agent() -> None:
    target = endpoint(headers={"Authorization": "Bearer x", "User-Agent": "shop/1.0", "x-list": " a, b "})
    headers = build_request(target, [posted()], 1, 1).headers
    assert headers["authorization"] == "Bearer x"
    assert headers["user-agent"] == "shop/1.0"
    assert headers["x-list"] == "a, b"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (name, "x")
            for name in ("Host", "content-length", "Transfer-Encoding", "connection", "keep-alive", "TE")
        ],
        *[
            (name, "x")
            for name in ("trailer", "upgrade", "Expect", "proxy-authorization", "Proxy-Connection")
        ],
        *[(name, "x") for name in ("content-type", "Content-Encoding", "accept-encoding", "Idempotency-Key")],
        *[(name, "x") for name in ("ce-id", "CE-type", "webhook-id", "Webhook-Signature", "pgmb-attempt")],
        *[(name, "x") for name in ("", " x", "x ", "x y", "x:", "x\r\ny", "ü", "x\0", "a" * 101)],
        *[
            ("x-ok", value)
            for value in ("a\r\nx: y", "a\nb", "\0", "\x7f", "a\tb", "\x85", "\ud800", "\u202e")
        ],
        ("x-long", "x" * 9000),
        ("x-none", None),
    ],
)
def test_headers_that_are_ours_or_no_headers_are_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_headers({name: value})
    assert caught.value.hint
    with pytest.raises(InvalidArgument):
        endpoint(headers={name: value})


def test_headers_are_not_given_twice_nor_without_end() -> None:
    with pytest.raises(InvalidArgument, match="twice"):
        check_headers({"X-a": "1", "x-A": "2"})
    with pytest.raises(InvalidArgument, match="at most 50"):
        check_headers({f"x-{number}": "1" for number in range(51)})


def test_nothing_that_may_be_secret_shows() -> None:
    secret = generate_secret()
    target = Endpoint(
        uuid4(), "billing", "https://h/hidden", headers={"a": "hidden"}, secrets=(parse_secret(secret),)
    )
    request = build_request(target, [posted(payload='"hidden"')], 1, 1)
    assert "billing" in repr(target)
    for shown in (repr(target), str(target), repr(request), str(request)):
        assert "hidden" not in shown
        assert secret.removeprefix("whsec_") not in shown
