"""Mask text that may hold secrets, URLs and headers, and escape control characters."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "…"
SEALED: Final = "pgmb-sealed:"
"""Before the base64 of a header's value that was sealed."""

_URL: Final = re.compile(
    r"(?P<scheme>[a-z]+)://(?:[^/?#@]*@)?(?P<host>[^/?#]*)(?P<path>[^?#]*)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_PLAIN_SEGMENT: Final = re.compile(r"[A-Za-z._-]{0,20}|v\d{1,2}")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET_NAME: Final = re.compile(r"auth|cookie|token|secret|key|pass|signature|credential", re.IGNORECASE)


def masked_url(url: str) -> str:
    """The scheme, the host and those parts of the path that are plain words."""
    found = _URL.fullmatch(url)
    if found is None:
        return HIDDEN
    path = "/".join(part if _PLAIN_SEGMENT.fullmatch(part) else HIDDEN for part in found["path"].split("/"))
    rest = f"?{HIDDEN}" if found["rest"] else ""
    return f"{found['scheme']}://{found['host']}{path}{rest}"


def is_secret(header: str) -> bool:
    """Whether a header of this name commonly holds a secret."""
    return _SECRET_NAME.search(header) is not None


def printable(text: str) -> str:
    """Text that cannot move the cursor or change colours: control characters are written out."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_json(document: str) -> str:
    """The same document without control characters. JSON has line ends and tabs between its tokens only, and
    all others in strings only, where they may be written as escapes.
    """
    return _CONTROL.sub(lambda found: " " if found[0] in "\t\r\n" else f"\\u{ord(found[0]):04x}", document)
