"""Durations as people write them: 30s, 5m, 2h, 7d, 1h30m. No I/O."""

from __future__ import annotations

import re
from datetime import timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)?\s*")
_LONGEST_SECONDS = 100 * 365 * 86400.0


def parse(text: str) -> timedelta:
    """A duration; a bare number counts seconds. Raises ValueError."""
    seconds, place = 0.0, 0
    words = text.strip().lower()
    while place < len(words):
        part = _PART.match(words, place)
        if part is None or (part[2] is None and (place > 0 or part.end() < len(words))):
            break
        seconds += float(part[1]) * _UNITS[part[2] or "s"]
        place = part.end()
    if not words or place < len(words) or seconds > _LONGEST_SECONDS:
        raise ValueError(f"not a duration: {text!r}. Write 30s, 5m, 2h or 7d.")
    return timedelta(seconds=seconds)


def show(value: timedelta) -> str:
    """A duration in its two largest units: 1h30m, 7d, 5.2s, 40ms."""
    seconds = value.total_seconds()
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if 0 < seconds < 1:
        return f"{sign}{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{sign}{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, length)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return sign + "".join(parts[:2])
