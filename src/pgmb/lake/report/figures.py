"""What a report is made of: figures of a time, without events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta
from typing import Final, NamedTuple

import msgspec

HOUR: Final = timedelta(hours=1)

_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
_VARYING: Final = re.compile(
    r"\b(?=[0-9a-fx-]*\d)[0-9a-f]{8,}(?:-[0-9a-f]+)*\b|0x[0-9a-f]+|\d+(?:[.,]\d+)*", re.IGNORECASE
)
_ERROR_CHARACTERS: Final = 160


class Series(NamedTuple):
    """Whose events they are."""

    stream: str
    topic: str


class Volume(NamedTuple):
    """Events of an hour, and the bytes of their topics, keys, payloads and headers."""

    events: int
    bytes: int


class KeyCount(NamedTuple):
    key: str
    events: int


class KeyDay(NamedTuple):
    """The keys of a day: how many there are, how many events have one, and the heaviest of them."""

    keys: int
    events: int
    heaviest: list[KeyCount]


class FieldDay(NamedTuple):
    """A field of payloads on a day. `type` is a JSON type; all payloads have the field "" (the whole)."""

    day: date
    path: str
    type: str
    events: int


class Failing(NamedTuple):
    """Where something failed, and how. Varying parts of the error are left out."""

    stream: str
    queue: str
    endpoint: str | None
    error: str


class Quantiles(NamedTuple):
    """Of seconds, of this number of events."""

    events: int
    median: float
    p95: float
    p99: float
    most: float


class Endpoint(NamedTuple):
    """Recorded requests: seconds of each, and from publication to success. log: which are recorded."""

    name: str
    stream: str
    queue: str
    log: str
    timeout: float
    attempts: int
    failed: int
    seconds: Quantiles | None
    delay: Quantiles | None


class Queue(NamedTuple):
    """A queue as it is now. at_least: the figures that are bounds."""

    name: str
    stream: str
    waiting: int
    oldest: timedelta | None
    retries: int
    dead: int
    paused: bool
    at_least: frozenset[str] = frozenset()


class Waiting(NamedTuple):
    """Events that wait to be tried again."""

    failing: Failing
    events: int
    attempts: int
    oldest: timedelta | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of [since, until), whole hours in UTC."""

    since: datetime
    until: datetime
    taken_at: datetime
    streams: list[str]
    sample: int = 1
    """One in so many payloads was parsed."""
    hours: dict[Series, dict[datetime, Volume]] = {}
    keys: dict[Series, KeyDay] = {}
    """Of the whole time."""
    key_days: dict[Series, dict[date, KeyDay]] = {}
    fields: dict[Series, list[FieldDay]] = {}
    dead: dict[Failing, dict[datetime, int]] = {}
    """Dead letters, by the hour in which they died."""
    deaths: dict[tuple[str, str], Quantiles] = {}
    """Seconds from publication to death, by stream and queue."""
    requests: dict[Failing, dict[datetime, int]] = {}
    """Failed requests to endpoints."""
    endpoints: list[Endpoint] = []
    queues: list[Queue] = []
    retries: list[Waiting] = []

    @property
    def clock(self) -> list[datetime]:
        """All hours of the time."""
        return [self.since + n * HOUR for n in range((self.until - self.since) // HOUR)]


def error_kind(text: str | None) -> str:
    """An error without its varying parts (numbers, quoted text, ids), so that equal failures are counted
    together."""
    if text is None or not text.strip():
        return "(no error given)"
    line = " ".join(text.split())
    kind = _VARYING.sub("…", _QUOTED.sub("…", line))
    return kind if len(kind) <= _ERROR_CHARACTERS else kind[: _ERROR_CHARACTERS - 1] + "…"


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Of values in any order, by the nearest rank; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(
        len(ordered), _ranked(ordered, 0.5), _ranked(ordered, 0.95), _ranked(ordered, 0.99), ordered[-1]
    )


def _ranked(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
