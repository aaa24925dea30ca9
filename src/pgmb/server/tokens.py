"""Keys, sessions and tickets: random text that its holder keeps, and the digest that the database knows."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Final

KEY: Final = "pgmb_key_"
SESSION: Final = "pgmb_session_"
TICKET: Final = "pgmb_ticket_"


def generate(prefix: str) -> str:
    """A new one, of 256 random bits. The prefix says what it is, to people and to scanners for leaks."""
    return prefix + secrets.token_urlsafe(32)


def digest(text: str) -> bytes:
    """What is stored. Plain SHA-256: there is nothing to guess in 256 random bits."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def csrf_of(session: str) -> str:
    """What a session's forms bring along, so that no other site can send one."""
    derived = hashlib.sha256(b"pgmb csrf " + session.encode("utf-8", "surrogateescape")).digest()
    return base64.urlsafe_b64encode(derived[:24]).decode()


def same(one: str, other: str) -> bool:
    """Compares without telling by its time where they differ."""
    return secrets.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
