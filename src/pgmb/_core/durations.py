"""Durations as people write them: 30s, 5m, 2h, 7d, 1h30m, 15 minutes. No I/O."""

from __future__ import annotations

import re
from datetime import timedelta

from pgmb.errors import InvalidArgument
from pgmb.types import Duration

_NAMES = {
    0.001: ("ms", "millisecond"),
    1.0: ("s", "sec", "second"),
    60.0: ("m", "min", "minute"),
    3600.0: ("h", "hr", "hour"),
    86400.0: ("d", "day"),
    604800.0: ("w", "week"),
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names}
_UNITS |= {f"{name}s": unit for name, unit in _UNITS.items() if len(name) > 2}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)?,?\s*")
_LONGEST_SECONDS = 100 * 365 * 86400.0


def parse(text: str) -> timedelta:
    """A duration; a bare number counts seconds. Raises ValueError."""
    seconds, place = 0.0, 0
    words = text.strip().lower()
    while place < len(words):
        part = _PART.match(words, place)
        if part is None or (part[2] is None and (place > 0 or part.end() < len(words))):
            break
        if part[2] is not None and part[2] not in _UNITS:
            break
        seconds += float(part[1]) * _UNITS[part[2] or "s"]
        place = part.end()
    if not words or place < len(words) or seconds > _LONGEST_SECONDS:
        raise ValueError(f"not a duration: {text!r}. Write 30s, 5m, 2h or 7d.")
    return timedelta(seconds=seconds)


def of(value: Duration) -> timedelta:
    """A duration as calls take it. Raises InvalidArgument."""
    if isinstance(value, timedelta):
        return value
    try:
        return parse(value) if isinstance(value, str) else timedelta(seconds=value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"not a duration: {value!r}; it is a timedelta, a number of seconds, or text such as '5m'"
        ) from error


def seconds(value: Duration) -> float:
    """The same as seconds, which may be more than a timedelta holds, or not a number."""
    return float(value) if isinstance(value, int | float) else of(value).total_seconds()


def optional_seconds(value: Duration | None) -> float | None:
    """The same of a limit that may be missing."""
    return None if value is None else seconds(value)


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
