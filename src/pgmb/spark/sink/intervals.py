"""Intervals as SQL writes them, and as Spark's `to_json` does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from pyspark.sql.types import DayTimeIntervalType

_UNITS: Final = ("DAY", "HOUR", "MINUTE", "SECOND")
_MICROSECONDS: Final = (86_400_000_000, 3_600_000_000, 60_000_000)


def day_time(kind: DayTimeIntervalType) -> Callable[[timedelta], str]:
    """What turns values of this type into quoted literals: "INTERVAL '1 02:03:04.5' DAY TO SECOND"."""
    first, last = int(kind.startField or 0), int(kind.endField or 0)
    units = _UNITS[first] if first == last else f"{_UNITS[first]} TO {_UNITS[last]}"

    def encode(value: timedelta) -> str:
        rest = value // timedelta(microseconds=1)
        sign, rest = ("-", -rest) if rest < 0 else ("", rest)
        text = ""
        for field in range(first, min(last, 2) + 1):
            number, rest = divmod(rest, _MICROSECONDS[field])
            text += "" if field == first else " " if field == 1 else ":"
            text += f"{number}" if field == 0 else f"{number:02}"
        if last == 3:
            seconds, fraction = divmod(rest, 1_000_000)
            text += f"{seconds:02}" if first == 3 else f":{seconds:02}"
            text += f".{fraction:06}".rstrip("0") if fraction else ""
        return f"\"INTERVAL '{sign}{text}' {units}\""

    return encode
