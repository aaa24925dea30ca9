"""Signatures are those of Standard Webhooks, by the reference library; nothing shows a secret."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from pgmb import InvalidArgument
from pgmb.webhooks.secrets import Secret, generate_secret, parse_secret, sign

pytestmark = pytest.mark.once


def headers(signature: str, message: str, timestamp: int) -> dict[str, str]:
    return {"webhook-id": message, "webhook-timestamp": str(timestamp), "webhook-signature": signature}


@given(key=st.binary(min_size=24, max_size=64), body=st.text(), message=st.uuids().map(str))
def test_the_reference_library_makes_the_same_signature(key: bytes, body: str, message: str) -> None:
    text = "whsec_" + base64.b64encode(key).decode()
    timestamp = 1_700_000_000
    expected = Webhook(text).sign(message, datetime.fromtimestamp(timestamp, UTC), body)
    assert sign([parse_secret(text)], message, timestamp, body.encode()) == expected


def test_the_reference_library_accepts_ours_and_notices_every_change() -> None:
    text, now = generate_secret(), int(time.time())
    signature = sign([parse_secret(text)], "msg_1", now, b'{"n": 1}')
    assert Webhook(text).verify(b'{"n": 1}', headers(signature, "msg_1", now)) == {"n": 1}
    for body, message, timestamp in [
        (b'{"n": 2}', "msg_1", now),
        (b'{"n": 1}', "msg_2", now),
        (b'{"n": 1}', "msg_1", now - 1),
    ]:
        with pytest.raises(WebhookVerificationError):
            Webhook(text).verify(body, headers(signature, message, timestamp))


def test_while_secrets_are_replaced_either_verifies() -> None:
    old, new, stranger = generate_secret(), generate_secret(), generate_secret()
    now = int(time.time())
    signature = sign([parse_secret(new), parse_secret(old)], "msg_1", now, b"1")
    assert len(signature.split(" ")) == 2
    for text in (old, new):
        assert Webhook(text).verify(b"1", headers(signature, "msg_1", now)) == 1
    with pytest.raises(WebhookVerificationError):
        Webhook(stranger).verify(b"1", headers(signature, "msg_1", now))


def test_ed25519_beside_hmac() -> None:
    shared, private = parse_secret(generate_secret()), parse_secret(generate_secret("v1a"))
    now = int(time.time())
    first, second = sign([shared, private], "msg_1", now, b"{}").split(" ")
    assert first.startswith("v1,")
    kind, signature = second.split(",")
    assert kind == "v1a"
    assert private.public is not None
    assert private.public.startswith("whpk_")
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(private.public.removeprefix("whpk_")))
    public.verify(base64.b64decode(signature), f"msg_1.{now}.{{}}".encode())
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(signature), f"msg_2.{now}.{{}}".encode())
    assert shared.public is None


def test_a_private_key_with_and_without_its_public_half() -> None:
    text = generate_secret("v1a")
    whole = base64.b64decode(text.removeprefix("whsk_"))
    assert len(whole) == 64
    seed = "whsk_" + base64.b64encode(whole[:32]).decode()
    assert parse_secret(seed) == parse_secret(text)
    assert parse_secret(seed).public == parse_secret(text).public
    with pytest.raises(InvalidArgument, match="public half"):
        parse_secret("whsk_" + base64.b64encode(whole[:32] + bytes(32)).decode())


def test_base64_may_lack_its_padding() -> None:
    text = "whsec_" + base64.b64encode(b"x" * 25).decode()
    assert parse_secret(text) == parse_secret(text.rstrip("=")) == Secret("v1", b"x" * 25)


@pytest.mark.parametrize("size", [0, 23, 65])
def test_secrets_too_short_or_too_long_are_refused(size: int) -> None:
    with pytest.raises(InvalidArgument, match="24 to 64 bytes"):
        parse_secret("whsec_" + base64.b64encode(b"x" * size).decode())


@pytest.mark.parametrize(
    "text", ["", "hunter2", "whpk_AAAA", "whsec_sécret!", "whsec_a b c", "whsk_AAAA", "WHSEC_x"]
)
def test_what_is_no_secret_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_secret(text)
    said = str(caught.value)
    assert caught.value.hint is not None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not text or text.removeprefix("whsec_").removeprefix("whsk_") not in said


def test_nothing_shows_a_secret() -> None:
    for kind in ("v1", "v1a"):
        text = generate_secret(kind)
        assert repr(parse_secret(text)) == f"Secret(kind='{kind}')"
        assert str(parse_secret(text)) == f"Secret(kind='{kind}')"


def test_generated_secrets_differ_and_have_32_bytes() -> None:
    texts = {generate_secret() for _ in range(10)}
    assert len(texts) == 10
    assert {len(parse_secret(text).key) for text in texts} == {32}
