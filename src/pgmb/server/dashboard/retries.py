"""A queue's retry policy, worked out: after which failure it waits for how long. No I/O."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_ISO = re.compile(r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?[\d.]+)S)?)?")
_SECONDS = (365.25 * 86400, 30 * 86400, 86400, 3600, 60, 1)
_SHOWN = 12


class Step(msgspec.Struct, frozen=True):
    """After the failure of this attempt, so long until the next one; `total` since the first."""

    attempt: int
    wait: float
    total: float


def schedule(settings: dict[str, Any]) -> list[Step]:
    """Without jitter; the last attempt is followed by none. At most a dozen."""
    base, most = duration(settings["backoff_base"]), duration(settings["backoff_max"])
    factor, attempts = float(settings["backoff_factor"]), int(settings["max_attempts"])
    steps: list[Step] = []
    total = 0.0
    for attempt in range(1, min(attempts, _SHOWN + 1)):
        # Far enough on, the power is more than a number can hold.
        exponent = min(attempt - 1, 300)
        wait = min(base * min(factor, 1e9) ** min(exponent, 30), most)
        total += wait
        steps.append(Step(attempt, wait, total))
    return steps


def duration(text: str | None) -> float:
    """Seconds of an interval that PostgreSQL wrote as ISO 8601."""
    found = _ISO.fullmatch(text or "")
    if found is None:
        return 0.0
    return sum(
        float(part) * size for part, size in zip(found.groups(), _SECONDS, strict=True) if part is not None
    )
