"""How dispatchers divide what an endpoint takes at a time, by the list of those that live alone. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def share_of(limit: int, endpoint: str, dispatcher: str, alive: Sequence[str]) -> int:
    """How many of `limit` requests a dispatcher may have under way. Those of all that live add up to it.

    What does not divide evenly goes to those whose hash with the endpoint is lowest: other ones for other
    endpoints.
    """
    if dispatcher not in alive:
        return 0
    each, rest = divmod(limit, len(alive))
    if rest == 0:
        return each
    ranked = sorted(alive, key=lambda one: hashlib.blake2b(f"{endpoint} {one}".encode()).digest())
    return each + (ranked.index(dispatcher) < rest)
