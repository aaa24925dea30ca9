"""What stands for a key for a while: sessions and tickets, random text as keys are."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Final

from pgmb._core.keys import KEY, digest, generate

__all__ = ["KEY", "SESSION", "TICKET", "csrf_of", "digest", "generate", "same"]

SESSION: Final = "pgmb_session_"
TICKET: Final = "pgmb_ticket_"


def csrf_of(session: str) -> str:
    """What a session's forms bring along, so that no other site can send one."""
    derived = hashlib.sha256(b"pgmb csrf " + session.encode("utf-8", "surrogateescape")).digest()
    return base64.urlsafe_b64encode(derived[:24]).decode()


def same(one: str, other: str) -> bool:
    """Compares without telling by its time where they differ."""
    return secrets.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
