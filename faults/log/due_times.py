"""Due times of cron expressions, compared with a plain walk over the wall clock of each time zone.

The walk shares nothing with `pgmb.cron`: it looks at every minute in turn (at every second for expressions
with six fields), reads the wall clock that `zoneinfo` shows then, and compares its fields with the
expression's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from pgmb import cron

ZONES: Final = {
    "Europe/Berlin": range(2026, 2036),
    "America/New_York": range(2026, 2036),
    "Africa/Casablanca": range(2026, 2036),  # forward and back around Ramadan
    "Australia/Lord_Howe": range(2026, 2036),  # by half an hour
    "Pacific/Chatham": range(2026, 2036),  # at 02:45
    "America/Santiago": range(2026, 2036),  # at midnight
    "Pacific/Apia": range(2011, 2021),  # had no 30 December 2011
    "Asia/Kolkata": range(2026, 2027),
}
"""The years in which each zone's changes are looked at."""

MINUTES: Final = [
    "* * * * *", "*/7 * * * *", "*/30 * * * *", "0 * * * *", "45 * * * *", "0 */2 * * *", "15 */3 * * *",
    "*/20 2 * * *", "*/15 0-3 * * *", "30 2 * * *", "0 2 * * *", "0 3 * * *", "59 1 * * *", "15,45 1-3 * * *",
    "0-59 2 * * *", "0/10 0-4 * * *", "0 0 * * *", "30 23 * * *", "5 0,1,2,3 * * 0", "10 2 1-31/2 * *",
    "0 12 * 3,10 *", "30 1 * * 6,7", "0 0 30 12 *", "0 3 28-31 * 0",
]  # fmt: skip
SECONDS: Final = [
    "*/10 * * * * *", "0 */15 * * * *", "30 0 * * * *", "0 30 2 * * *", "*/20 30 2 * * *",
    "15,45 0-59 2 * * *", "0 0/20 1-3 * * *", "5 5 0 * * *", "0 0 */2 * * *", "59 59 1 * * *", "* 0 2 * * *",
    "0 15 2 29 3 *",
]  # fmt: skip


@dataclass(slots=True)
class Result:
    compared: int = 0
    wrong: int = 0
    first: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.wrong == 0 and self.compared > 0

    def add(self, what: str, walked: list[datetime], told: list[datetime]) -> None:
        self.compared += len(walked)
        differing = sorted(set(walked) ^ set(told))
        self.wrong += len(differing) + abs(len(told) - len(set(told)))
        if differing and not self.first:
            where = "missing" if differing[0] in walked else "too many"
            self.first = f", the first {where} at {differing[0].isoformat()} of {what}"

    def __str__(self) -> str:
        return (
            f"due times: {self.compared} compared | {'holds' if self.holds else 'VIOLATED'}:"
            f" {self.wrong} differ{self.first} | {self.seconds:.1f} s"
        )


def run(*, years: int, around: timedelta, around_seconds: timedelta) -> Result:
    """Compares the due times around each change of a clock in the first `years` years of each zone."""
    result = Result()
    began = time.monotonic()
    for name, span in ZONES.items():
        zone = ZoneInfo(name)
        for change in changes(zone, span[:years]):
            for expression in MINUTES:
                compare(result, expression, name, change - around, change + around)
            for expression in SECONDS:
                compare(result, expression, name, change - around_seconds, change + around_seconds)
    result.seconds = time.monotonic() - began
    return result


def compare(result: Result, expression: str, zone: str, start: datetime, end: datetime) -> None:
    """Compares the due times after `start` up to `end`."""
    walked = list(walk(expression, ZoneInfo(zone), start, end))
    told: list[datetime] = []
    due = cron.next_after(expression, zone, start)
    while due is not None and due <= end:
        told.append(due)
        following = cron.next_after(expression, zone, due)
        if following is not None and following <= due:
            result.wrong += 1
            result.first = result.first or f", {following} follows {due} of {expression} in {zone}"
            break
        due = following
    result.add(f"{expression} in {zone}", walked, told)


def walk(expression: str, zone: ZoneInfo, start: datetime, end: datetime) -> Iterator[datetime]:
    """The due times after `start` up to `end`, found by looking at every step of the clock."""
    fields = expression.split()
    step = timedelta(seconds=1) if len(fields) == 6 else timedelta(minutes=1)
    wanted = _Wanted(fields)
    # As in Debian's cron: an expression without a star in minute and hour names times of day.
    fixed = not fields[-5].startswith("*") and not fields[-4].startswith("*")
    shown_before = start.astimezone(zone).replace(tzinfo=None)
    at = start + step
    while at <= end:
        local = at.astimezone(zone)
        shown = local.replace(tzinfo=None, fold=0)
        if not fixed:
            due = wanted.matches(shown)
        else:
            due = local.fold == 0 and wanted.matches(shown)
            skipped = shown_before + step
            while skipped < shown and not due:
                due = wanted.matches(skipped)
                skipped += step
        if due:
            yield at
        shown_before = shown
        at += step


class _Wanted:
    """The values that an expression accepts, field by field."""

    def __init__(self, fields: list[str]) -> None:
        limits = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]
        texts = fields if len(fields) == 6 else ["0", *fields]
        self._sets = [_values(text, *limit) for text, limit in zip(texts, limits, strict=True)]
        self._both_days = texts[3].startswith("*") or texts[5].startswith("*")

    def matches(self, at: datetime) -> bool:
        seconds, minutes, hours, days, months, weekdays = self._sets
        if at.minute not in minutes or at.hour not in hours or at.second not in seconds:
            return False
        day = at.day in days
        weekday = at.isoweekday() in weekdays or at.isoweekday() % 7 in weekdays
        return at.month in months and (day and weekday if self._both_days else day or weekday)


def _values(text: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            values = range(low, high + 1)
        elif last:
            values = range(int(first), int(last) + 1)
        else:
            values = range(int(first), (high if step else int(first)) + 1)
        found |= set(values[:: int(step or 1)])
    return found


def changes(zone: ZoneInfo, years: range) -> Iterator[datetime]:
    """When the clock of a zone is set in these years; if it never is, their beginning."""
    day, quarter = timedelta(days=1), timedelta(minutes=15)
    at = datetime(years[0], 1, 1, tzinfo=UTC)
    end = datetime(years[-1] + 1, 1, 2, tzinfo=UTC)
    found = False
    while at < end:
        before = at.astimezone(zone).utcoffset()
        if before != (at + day).astimezone(zone).utcoffset():
            found = True
            change = at + quarter
            while change.astimezone(zone).utcoffset() == before:
                change += quarter
            yield change
        at += day
    if not found:
        yield datetime(years[0], 1, 1, tzinfo=UTC)
