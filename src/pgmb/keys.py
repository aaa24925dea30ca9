"""Keys for HTTP: random text that its holder keeps, and the digest that the database knows. No I/O."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, LiteralString

from pgmb.statements import Statement, aware
from pgmb.statements import call as _call

KEY: Final = "pgmb_key_"

_TYPES: Final[dict[str, LiteralString]] = {
    "action": "text",
    "actor": "text",
    "detail": "jsonb",
    "digest": "bytea",
    "expires_at": "timestamptz",
    "name": "text",
    "scopes": "text[]",
    "subject": "text",
}

API_KEYS: Final = Statement(
    "select id, name, scopes, created_at, expires_at, used_at from pgmb.api_keys order by name", ()
)
_AUDIT: Final = (
    "select id, at, actor, action, subject, detail::json from pgmb.audit"
    " where id < %s::bigint order by id desc limit %s::integer"
)
_NO_ID: Final = 2**63 - 1


def generate(prefix: str = KEY) -> str:
    """A new one, of 256 random bits. The prefix says what it is, to people and to scanners for leaks."""
    return prefix + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """What is stored. Plain SHA-256: there is nothing to guess in 256 random bits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def create(name: str, text: str, scopes: Iterable[str], expires_at: datetime | None) -> Statement:
    return _call(
        "create_api_key", _TYPES, name=name, digest=digest(text), scopes=scopes, expires_at=aware(expires_at)
    )


def drop(name: str) -> Statement:
    return _call("drop_api_key", _TYPES, name=name)


def record(actor: str, action: str, subject: str | None, detail: Any) -> Statement:
    return _call("record", _TYPES, actor=actor, action=action, subject=subject, detail=detail)


def audit(limit: int, before: int | None) -> Statement:
    return Statement(_AUDIT, (_NO_ID if before is None else before, limit))
