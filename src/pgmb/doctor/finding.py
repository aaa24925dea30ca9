"""A finding, the limits that make one, and what a check is. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, LiteralString, NamedTuple, TypeAlias

import msgspec


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing, no problem."""
    SKIP = "skip"
    """Could not be looked at: the message says why."""
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """What a check found. Every problem names its fix."""

    check: str
    level: Level
    message: str
    fix: str | None = None

    @property
    def problem(self) -> bool:
        return self.level in (Level.WARN, Level.FAIL)


class Limits(msgspec.Struct, frozen=True):
    """From where on something is a problem."""

    pinned_for: timedelta = timedelta(minutes=5)
    pinned_xids: int = 10_000_000
    standing_for: timedelta = timedelta(minutes=5)
    """For how long maintenance may be behind although it runs."""
    unkept_for: timedelta = timedelta(minutes=1)
    """For how long ticker, janitor or scheduler may have done nothing that was due."""
    unarchived_for: timedelta = timedelta(hours=1)
    held_for: timedelta = timedelta(hours=1)
    """For how long a reader may hold back retention."""
    waiting_for: timedelta = timedelta(minutes=5)
    expired: int = 10
    lease_numbers: float = 0.5
    """The part of a queue's lease numbers that may be used."""
    skew: timedelta = timedelta(seconds=2)
    connections: float = 0.9
    disk: float = 0.1
    """The part of the disk that shall be free."""


class Verdict(NamedTuple):
    level: Level
    message: str
    fix: str | None = None


class Look(NamedTuple):
    """What a check's query answered, and who asked when."""

    rows: list[dict[str, Any]]
    limits: Limits
    process: int
    """The server process as the connection names it; a pooler makes one up."""
    host: str
    asked_at: datetime
    answered_at: datetime


Judge: TypeAlias = Callable[[Look], Iterable[Verdict]]


class Check(NamedTuple):
    name: str
    fine: str
    """What to say where the judge finds nothing."""
    query: LiteralString
    judge: Judge
    of_schema: bool = True
    """Whether it makes sense only where the schema is installed, in the right version."""
    gate: bool = False
    """Whether a problem here makes looking at the schema pointless."""


def ok(message: str) -> Verdict:
    return Verdict(Level.OK, message)


def note(message: str, fix: str | None = None) -> Verdict:
    return Verdict(Level.NOTE, message, fix)


def skip(message: str, fix: str | None = None) -> Verdict:
    return Verdict(Level.SKIP, message, fix)


def warn(message: str, fix: str) -> Verdict:
    return Verdict(Level.WARN, message, fix)


def fail(message: str, fix: str) -> Verdict:
    return Verdict(Level.FAIL, message, fix)


def ago(duration: timedelta) -> str:
    """A duration as people say it: 45 s, 12 min, 3 h, 5 d."""
    seconds = duration.total_seconds()
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
