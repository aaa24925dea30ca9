"""API keys: random text for the client, of which the database stores the digest. And the audit log."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from pgmb._core.statements import Statement, aware, call

KEY: Final = "pgmb_key_"

API_KEYS: Final = Statement(
    "select id, name, scopes, created_at, expires_at, used_at from pgmb.api_keys order by name", ()
)
_AUDIT: Final = (
    "select id, at, actor, action, subject, detail::json from pgmb.audit"
    " where id < %s::bigint order by id desc limit %s::integer"
)
_AFTER_ALL_IDS: Final = 2**63 - 1


def generate(prefix: str = KEY) -> str:
    """A new key of 256 random bits. Secret scanners recognise the prefix."""
    return prefix + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """The digest to store. SHA-256 suffices: 256 random bits cannot be guessed."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def create(name: str, text: str, scopes: Iterable[str], expires_at: datetime | None) -> Statement:
    return call("create_api_key", name=name, digest=digest(text), scopes=scopes, expires_at=aware(expires_at))


def drop(name: str) -> Statement:
    return call("drop_api_key", name=name)


def record(actor: str, action: str, subject: str | None, detail: Any) -> Statement:
    return call("record", actor=actor, action=action, subject=subject, detail=detail)


def audit(limit: int, before: int | None) -> Statement:
    return Statement(_AUDIT, (_AFTER_ALL_IDS if before is None else before, limit))
