"""Signatures of requests, as Standard Webhooks 1.0.0 has them. No I/O."""

from __future__ import annotations

import hmac
import secrets as randomness
from base64 import b64decode, b64encode
from binascii import b2a_base64
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pgmb.errors import InvalidArgument

Kind: TypeAlias = Literal["v1", "v1a"]
"""`v1`: HMAC-SHA256 by a key that both sides hold. `v1a`: ed25519, where the receiver holds a public key."""

_SHARED, _PRIVATE, _PUBLIC = "whsec_", "whsk_", "whpk_"
_SHORTEST, _LONGEST = 24, 64
_SEED = 32


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """What requests are signed with. It shows itself to nobody."""

    kind: Kind
    key: bytes
    """The HMAC key, or the private key's seed."""
    _hmac: hmac.HMAC = field(init=False, compare=False)
    _private: Ed25519PrivateKey | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Both are prepared once: a copy of an HMAC costs half of a new one.
        object.__setattr__(self, "_hmac", hmac.new(self.key, digestmod="sha256"))
        private = Ed25519PrivateKey.from_private_bytes(self.key) if self.kind == "v1a" else None
        object.__setattr__(self, "_private", private)

    def __repr__(self) -> str:
        return f"Secret(kind={self.kind!r})"

    @property
    def public(self) -> str | None:
        """What a receiver checks with, `whpk_…`; of kind v1 there is none."""
        if self._private is None:
            return None
        return _PUBLIC + b64encode(self._private.public_key().public_bytes_raw()).decode()

    def sign(self, content: bytes) -> str:
        """One signature, with its kind before it."""
        if self._private is not None:
            return "v1a," + b2a_base64(self._private.sign(content), newline=False).decode()
        mac = self._hmac.copy()
        mac.update(content)
        return "v1," + b2a_base64(mac.digest(), newline=False).decode()


def sign(secrets: Iterable[Secret], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature by each secret, so that receivers may change theirs."""
    content = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    return " ".join([secret.sign(content) for secret in secrets])


def parse_secret(text: str) -> Secret:
    """The secret of a text that begins with `whsec_` or `whsk_`."""
    if text.startswith(_SHARED):
        key = _decoded(text.removeprefix(_SHARED))
        if not _SHORTEST <= len(key) <= _LONGEST:
            raise _refused(f"a secret has {_SHORTEST} to {_LONGEST} bytes, not {len(key)}")
        return Secret("v1", key)
    if text.startswith(_PRIVATE):
        key = _decoded(text.removeprefix(_PRIVATE))
        # The seed alone, or with the public key behind it, as most libraries write it.
        if len(key) not in (_SEED, 2 * _SEED):
            raise _refused(f"a private key has {_SEED} or {2 * _SEED} bytes, not {len(key)}")
        secret = Secret("v1a", key[:_SEED])
        if len(key) > _SEED and secret.public != _PUBLIC + b64encode(key[_SEED:]).decode():
            raise _refused("the public half of the private key is not its own")
        return secret
    raise _refused(f"a secret begins with {_SHARED} or {_PRIVATE}")


def generate_secret(kind: Kind = "v1") -> str:
    """The text of a new secret."""
    if kind == "v1":
        return _SHARED + b64encode(randomness.token_bytes(32)).decode()
    private = Ed25519PrivateKey.generate()
    both = private.private_bytes_raw() + private.public_key().public_bytes_raw()
    return _PRIVATE + b64encode(both).decode()


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except ValueError:
        # Not chained: its traceback would hold the secret.
        raise _refused("a secret is base64 behind its prefix") from None


def _refused(said: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise("pgmb.delivery.signature.generate_secret() makes one.")
    return error
