"""Secrets of endpoints: signing requests (Standard Webhooks 1.0.0), and sealing secrets at rest.

A sealed secret consists of a version, the sealing key's id, a nonce and the AES-256-GCM ciphertext. Version,
key id and the endpoint's id are authenticated: a secret sealed for one endpoint cannot be opened for another.
The database never sees the sealing key.
"""

from __future__ import annotations

import hmac
import os
import secrets as randomness
from base64 import b64decode, b64encode
from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal, Self, TypeAlias
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pgmb._core.masking import SEALED, is_secret
from pgmb.errors import InvalidArgument, PgmbError, SecretKeyMissing, SecretUnreadable

SecretKind: TypeAlias = Literal["v1", "v1a"]
"""`v1`: HMAC-SHA256 with a shared key. `v1a`: ed25519; the receiver has the public key."""

_SHARED, _PRIVATE, _PUBLIC = "whsec_", "whsk_", "whpk_"
_SHORTEST_SECRET, _LONGEST_SECRET = 24, 64
_SEED = 32


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A signing secret. The repr hides it."""

    kind: SecretKind
    key: bytes
    """The HMAC key, or the private key's seed."""
    _hmac: hmac.HMAC = field(init=False, compare=False)
    _private: Ed25519PrivateKey | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Prepared once: copying an HMAC costs half as much as creating one.
        object.__setattr__(self, "_hmac", hmac.new(self.key, digestmod="sha256"))
        private = Ed25519PrivateKey.from_private_bytes(self.key) if self.kind == "v1a" else None
        object.__setattr__(self, "_private", private)

    def __repr__(self) -> str:
        return f"Secret(kind={self.kind!r})"

    @property
    def public(self) -> str | None:
        """The public key for receivers, `whpk_…`; None for kind v1."""
        if self._private is None:
            return None
        return _PUBLIC + b64encode(self._private.public_key().public_bytes_raw()).decode()

    def sign(self, content: bytes) -> str:
        """The signature, prefixed with its kind."""
        if self._private is not None:
            return "v1a," + b2a_base64(self._private.sign(content), newline=False).decode()
        mac = self._hmac.copy()
        mac.update(content)
        return "v1," + b2a_base64(mac.digest(), newline=False).decode()


def sign(secrets: Iterable[Secret], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`: one signature per secret, so that secrets can be rotated."""
    content = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    return " ".join([secret.sign(content) for secret in secrets])


def parse_secret(text: str) -> Secret:
    """Parse a secret that begins with `whsec_` or `whsk_`. Raises InvalidArgument."""
    if text.startswith(_SHARED):
        key = _decoded(text.removeprefix(_SHARED))
        if not _SHORTEST_SECRET <= len(key) <= _LONGEST_SECRET:
            raise _invalid_secret(
                f"a secret has {_SHORTEST_SECRET} to {_LONGEST_SECRET} bytes, not {len(key)}"
            )
        return Secret("v1", key)
    if text.startswith(_PRIVATE):
        key = _decoded(text.removeprefix(_PRIVATE))
        # The seed, followed by the public key in the format of most libraries.
        if len(key) not in (_SEED, 2 * _SEED):
            raise _invalid_secret(f"a private key has {_SEED} or {2 * _SEED} bytes, not {len(key)}")
        secret = Secret("v1a", key[:_SEED])
        if len(key) > _SEED and secret.public != _PUBLIC + b64encode(key[_SEED:]).decode():
            raise _invalid_secret("the public half of the private key is not its own")
        return secret
    raise _invalid_secret(f"a secret begins with {_SHARED} or {_PRIVATE}")


def generate_secret(kind: SecretKind = "v1") -> str:
    """Generate a secret, as text."""
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
        raise _invalid_secret("a secret is base64 behind its prefix") from None


def _invalid_secret(said: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise("Create one with pgmb.webhooks.secrets.generate_secret().")
    return error


KEY_VARIABLE = "PGMB_SECRET_KEY"
KEY_FILE_VARIABLE = "PGMB_SECRET_KEY_FILE"

_SEALED_VERSION = b"\x01"
_KEY_BYTES, _KEY_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 32, 4, 12, 16
_KEY_HINT = (
    f"Set {KEY_VARIABLE} to the base64 of {_KEY_BYTES} random bytes, or {KEY_FILE_VARIABLE} to a file of it."
)


class SealingKey:
    """One or more keys. The first seals; all of them open."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise _advised(SecretKeyMissing("there is no key to seal secrets with"), _KEY_HINT)
        if any(len(key) != _KEY_BYTES for key in keys):
            raise _advised(SecretKeyMissing(f"a key to seal secrets with has {_KEY_BYTES} bytes"), _KEY_HINT)
        self._first = _key_id(keys[0])
        self._ciphers = {_key_id(key): AESGCM(key) for key in keys}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse base64 keys, separated by white space."""
        try:
            keys = [b64decode(word, validate=True) for word in text.split()]
        except ValueError:
            # Not chained: its traceback would hold the key.
            raise _advised(SecretKeyMissing("a key to seal secrets with is base64"), _KEY_HINT) from None
        return cls(keys)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read PGMB_SECRET_KEY, or the file that PGMB_SECRET_KEY_FILE names."""
        text, path = environment.get(KEY_VARIABLE), environment.get(KEY_FILE_VARIABLE)
        if text and path:
            raise _advised(
                SecretKeyMissing(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set"), "Set one of them."
            )
        if path:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                said = f"the file that {KEY_FILE_VARIABLE} names cannot be read: {reason}"
                raise _advised(SecretKeyMissing(said), _KEY_HINT) from None
        return cls.parse(text or "")

    def __repr__(self) -> str:
        return f"SealingKey({', '.join(self.ids)})"

    @property
    def ids(self) -> tuple[str, ...]:
        """Digests that identify the keys in errors without revealing them. The first seals."""
        return tuple(key_id.hex() for key_id in self._ciphers)

    def seal(self, text: str, endpoint_id: UUID) -> bytes:
        """Encrypt a secret for an endpoint."""
        nonce = os.urandom(_NONCE_BYTES)
        head = _SEALED_VERSION + self._first
        sealed = self._ciphers[self._first].encrypt(nonce, text.encode(), head + endpoint_id.bytes)
        return head + nonce + sealed

    def open(self, sealed: bytes, endpoint_id: UUID) -> str:
        """Decrypt a secret that was sealed for the same endpoint."""
        if len(sealed) < 1 + _KEY_ID_BYTES + _NONCE_BYTES + _TAG_BYTES or sealed[:1] != _SEALED_VERSION:
            said = "this is no sealed secret, or one of a later version of pgmb"
            raise _advised(SecretUnreadable(said), "Upgrade pgmb, or set a new secret for the endpoint.")
        head, nonce, rest = (
            sealed[: 1 + _KEY_ID_BYTES],
            sealed[1 + _KEY_ID_BYTES : 1 + _KEY_ID_BYTES + _NONCE_BYTES],
            sealed[1 + _KEY_ID_BYTES + _NONCE_BYTES :],
        )
        cipher = self._ciphers.get(head[1:])
        if cipher is None:
            said = f"the secret was sealed with the key {head[1:].hex()}; given: {', '.join(self.ids)}"
            raise _advised(
                SecretUnreadable(said), f"Add that key to {KEY_VARIABLE}, behind the one that seals."
            )
        try:
            return cipher.decrypt(nonce, rest, head + endpoint_id.bytes).decode()
        except InvalidTag:
            said = f"the secret was changed, or is not one of endpoint {endpoint_id}"
            raise _advised(SecretUnreadable(said), "Set a new secret for the endpoint.") from None

    def sealed_by_the_first(self, sealed: bytes) -> bool:
        """Whether the first key sealed this. If not, an older key is still needed."""
        return sealed[1 : 1 + _KEY_ID_BYTES] == self._first


def seal_headers(key: SealingKey, endpoint_id: UUID, headers: Mapping[str, str]) -> dict[str, str]:
    """Seal the values of headers whose names suggest a secret, for storage."""
    return {
        name: SEALED + b64encode(key.seal(value, endpoint_id)).decode()
        if is_secret(name) and not value.startswith(SEALED)
        else value
        for name, value in headers.items()
    }


def open_headers(key: SealingKey | None, endpoint_id: UUID, headers: Mapping[str, str]) -> dict[str, str]:
    """Open the values that seal_headers() sealed."""
    opened = dict(headers)
    for name, value in headers.items():
        if value.startswith(SEALED):
            if key is None:
                raise _advised(
                    SecretKeyMissing("it has sealed headers, and there is no key to open them"), _KEY_HINT
                )
            opened[name] = key.open(b64decode(value.removeprefix(SEALED)), endpoint_id)
    return opened


def generate_key() -> str:
    """Generate a sealing key, as text."""
    return b64encode(os.urandom(_KEY_BYTES)).decode()


def _key_id(key: bytes) -> bytes:
    return sha256(b"pgmb sealing key" + key).digest()[:_KEY_ID_BYTES]


def _advised(error: PgmbError, hint: str) -> PgmbError:
    error.advise(hint)
    return error
