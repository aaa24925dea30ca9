"""Secrets at rest: sealed by a key that the database never sees. No I/O but reading that key.

A sealed secret is a version, the key's id, a nonce and what AES-256-GCM made of the text. The version, the
key's id and the endpoint's id are authenticated too: what was sealed for one endpoint opens for no other.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Self
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pgmb.errors import PgmbError, SecretKeyMissing, SecretUnreadable
from pgmb.masking import SEALED, is_secret

VARIABLE = "PGMB_SECRET_KEY"
VARIABLE_OF_A_FILE = "PGMB_SECRET_KEY_FILE"

_VERSION = b"\x01"
_KEY, _ID, _NONCE, _TAG = 32, 4, 12, 16
_ADVICE = f"Set {VARIABLE} to the base64 of {_KEY} random bytes, or {VARIABLE_OF_A_FILE} to a file of it."


class Key:
    """One or several keys: the first seals, all of them open."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise _advised(SecretKeyMissing("there is no key to seal secrets with"), _ADVICE)
        if any(len(key) != _KEY for key in keys):
            raise _advised(SecretKeyMissing(f"a key to seal secrets with has {_KEY} bytes"), _ADVICE)
        self._first = _id_of(keys[0])
        self._ciphers = {_id_of(key): AESGCM(key) for key in keys}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of base64, several separated by blanks."""
        try:
            keys = [b64decode(word, validate=True) for word in text.split()]
        except ValueError:
            # Not chained: its traceback would hold the key.
            raise _advised(SecretKeyMissing("a key to seal secrets with is base64"), _ADVICE) from None
        return cls(keys)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Of PGMB_SECRET_KEY, or of the file that PGMB_SECRET_KEY_FILE names."""
        text, path = environment.get(VARIABLE), environment.get(VARIABLE_OF_A_FILE)
        if text and path:
            raise _advised(
                SecretKeyMissing(f"{VARIABLE} and {VARIABLE_OF_A_FILE} are both set"), "Set one of them."
            )
        if path:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                said = f"the file that {VARIABLE_OF_A_FILE} names cannot be read: {reason}"
                raise _advised(SecretKeyMissing(said), _ADVICE) from None
        return cls.parse(text or "")

    def __repr__(self) -> str:
        return f"Key({', '.join(self.ids)})"

    @property
    def ids(self) -> tuple[str, ...]:
        """What names the keys in errors: digests, from which no key can be had. The first seals."""
        return tuple(key_id.hex() for key_id in self._ciphers)

    def seal(self, text: str, endpoint_id: UUID) -> bytes:
        """Seal a secret of an endpoint."""
        nonce = os.urandom(_NONCE)
        head = _VERSION + self._first
        sealed = self._ciphers[self._first].encrypt(nonce, text.encode(), head + endpoint_id.bytes)
        return head + nonce + sealed

    def open(self, sealed: bytes, endpoint_id: UUID) -> str:
        """Open what seal() made for the same endpoint."""
        if len(sealed) < 1 + _ID + _NONCE + _TAG or sealed[:1] != _VERSION:
            said = "this is no sealed secret, or one of a later version of pgmb"
            raise _advised(SecretUnreadable(said), "Upgrade pgmb, or set the endpoint's secret anew.")
        head, nonce, rest = sealed[: 1 + _ID], sealed[1 + _ID : 1 + _ID + _NONCE], sealed[1 + _ID + _NONCE :]
        cipher = self._ciphers.get(head[1:])
        if cipher is None:
            said = f"the secret was sealed with the key {head[1:].hex()}; given: {', '.join(self.ids)}"
            raise _advised(SecretUnreadable(said), f"Add that key to {VARIABLE}, behind the one that seals.")
        try:
            return cipher.decrypt(nonce, rest, head + endpoint_id.bytes).decode()
        except InvalidTag:
            said = f"the secret was changed, or is not one of endpoint {endpoint_id}"
            raise _advised(SecretUnreadable(said), "Set the endpoint's secret anew.") from None

    def sealed_by_the_first(self, sealed: bytes) -> bool:
        """Whether the key that seals now sealed this; otherwise the older key is still needed."""
        return sealed[1 : 1 + _ID] == self._first


def seal_headers(key: Key, endpoint_id: UUID, headers: Mapping[str, str]) -> dict[str, str]:
    """An endpoint's headers as they are stored: those that commonly hold secrets are sealed."""
    return {
        name: SEALED + b64encode(key.seal(value, endpoint_id)).decode()
        if is_secret(name) and not value.startswith(SEALED)
        else value
        for name, value in headers.items()
    }


def open_headers(key: Key | None, endpoint_id: UUID, headers: Mapping[str, str]) -> dict[str, str]:
    """What seal_headers() stored, as it is sent."""
    opened = dict(headers)
    for name, value in headers.items():
        if value.startswith(SEALED):
            if key is None:
                raise _advised(
                    SecretKeyMissing("it has sealed headers, and there is no key to open them"), _ADVICE
                )
            opened[name] = key.open(b64decode(value.removeprefix(SEALED)), endpoint_id)
    return opened


def generate_key() -> str:
    """The text of a new key."""
    return b64encode(os.urandom(_KEY)).decode()


def _id_of(key: bytes) -> bytes:
    return sha256(b"pgmb sealing key" + key).digest()[:_ID]


def _advised(error: PgmbError, hint: str) -> PgmbError:
    error.advise(hint)
    return error
