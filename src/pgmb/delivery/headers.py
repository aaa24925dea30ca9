"""Headers of requests: which are ours, which an endpoint may add, and how text becomes a header. No I/O."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from importlib.metadata import version

from pgmb.errors import InvalidArgument

USER_AGENT = f"pgmb/{version('pgmb')}"

_OURS = frozenset({"accept-encoding", "content-encoding", "content-type", "idempotency-key"})
_OURS_BEGIN = ("ce-", "pgmb-", "webhook-")
# They belong to the connection, or say how the message is cut: whoever sets them speaks over us.
_OF_THE_CONNECTION = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_MOST, _LONGEST = 50, 8192


def check_headers(headers: Mapping[str, object]) -> dict[str, str]:
    """The headers that an endpoint adds, their names in lower case. Raises InvalidArgument."""
    checked: dict[str, str] = {}
    for name, value in headers.items():
        lower = name.lower()
        if not _NAME.fullmatch(name):
            raise _refused(f"{name[:100]!r} is no name of a header")
        if lower in _OURS or lower.startswith(_OURS_BEGIN):
            raise _refused(f"the header {lower} is pgmb's own")
        if lower in _OF_THE_CONNECTION or lower.startswith("proxy-"):
            raise _refused(f"the header {lower} belongs to the connection")
        if lower in checked:
            raise _refused(f"the header {lower} is given twice")
        # The value may be a password: it is not shown.
        if not isinstance(value, str) or any(unicodedata.category(letter)[0] == "C" for letter in value):
            raise _refused(f"the value of the header {lower} is no text, or has control characters")
        checked[lower] = value.strip(" ")
    if len(checked) > _MOST or sum(map(len, checked)) + sum(map(len, checked.values())) > _LONGEST:
        raise _refused(f"an endpoint adds at most {_MOST} headers, of {_LONGEST} characters together")
    return checked


class _PercentEncoded(dict[int, str]):
    def __missing__(self, letter: int) -> str:
        return "".join(f"%{byte:02X}" for byte in chr(letter).encode())


_PLAIN = re.compile(r"[!#$&-~]*").fullmatch
_ENCODED = _PercentEncoded({letter: chr(letter) for letter in range(0x21, 0x7F) if chr(letter) not in '"%'})
_ENCODED.update({letter: f"%{letter:02X}" for letter in (*range(0x21), ord('"'), ord("%"), 0x7F)})


def percent_encoded(text: str) -> str:
    """Text as a header's value, as CloudEvents have it: blanks, quotes, percents and non-ASCII encoded."""
    return text if _PLAIN(text) else text.translate(_ENCODED)


def _refused(said: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise("An endpoint adds headers of its own, such as authorization or x-tenant.")
    return error
