"""What is unusual in the figures of a report. Each rule is stated in `RULES`, which the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from statistics import median
from typing import Final, NamedTuple

from pgmb.lake.report.figures import HOUR, FieldDay, Figures, Series

SPIKE_SIGMAS: Final = 6.0
SILENCE_SIGMAS: Final = 4.0
SPIKE_EVENTS: Final = 50
SPIKE_RATIO: Final = 2.0
SILENCE_EXPECTED: Final = 20
SILENCE_RATIO: Final = 0.1
LIKE_HOURS: Final = 5
IRREGULAR: Final = 0.05
KEY_EVENTS: Final = 100
KEY_SHARE: Final = 0.1
KEY_RATIO: Final = 3.0
KEY_DAYS: Final = 5
BURST_EVENTS: Final = 20
BURST_RATIO: Final = 5.0
FIELD_EVENTS: Final = 10
FIELD_EXPECTED: Final = 30
SLOW_REQUESTS: Final = 20
SLOW_SHARE: Final = 0.5
LAG: Final = timedelta(hours=1)

RULES: Final[dict[str, str]] = {
    "spike": (
        f"An hour of a topic has at least {SPIKE_EVENTS} events, {SPIKE_RATIO:g} times the median of like"
        f" hours, and {SPIKE_SIGMAS:g} deviations more than it. Like hours are the same hour of the day on"
        f" working days, or on weekends (UTC), or on all days if there are fewer than {LIKE_HOURS}. A"
        " deviation is 1.48 times the median absolute deviation, and no less than the square root of the"
        " median."
    ),
    "silence": (
        f"An hour of a topic has at most {SILENCE_RATIO:.0%} of the median of like hours, which is at least"
        f" {SILENCE_EXPECTED}, and {SILENCE_SIGMAS:g} deviations less. A topic is judged from its first event"
        " on."
    ),
    "heavy key": (
        f"A key has at least {KEY_EVENTS} events and {KEY_SHARE:.0%} of its topic's on a day, and"
        f" {KEY_RATIO:g} times the share of the heaviest key on a median day, of at least {KEY_DAYS} days."
    ),
    "burst of errors": (
        f"An error of a queue or endpoint occurs at least {BURST_EVENTS} times in an hour, {BURST_RATIO:g}"
        f" times the median of all hours, and {SPIKE_SIGMAS:g} deviations more than it."
    ),
    "field appeared": (
        f"A field is in at least {FIELD_EVENTS} payloads of a topic from a day on, and at least"
        f" {FIELD_EXPECTED} of the days before would have it if it had been as frequent."
    ),
    "field vanished": (
        f"A field is in no payload of a topic after a day, and at least {FIELD_EXPECTED} would have it if it"
        " were as frequent as before."
    ),
    "field changed type": (
        "A type of a field appeared by the same rule, while the field had another one before. Null is not a"
        " type."
    ),
    "slow endpoint": (
        f"Of at least {SLOW_REQUESTS} recorded requests, 5 % take longer than {SLOW_SHARE:.0%} of the"
        " endpoint's timeout."
    ),
    "lag": (
        f"The oldest event that waits in a queue is older than {LAG // HOUR} hour. Paused queues are left"
        " out."
    ),
}


class Anomaly(NamedTuple):
    """Something unusual of a topic, queue or endpoint (`name`), from when to when; None: now."""

    rule: str
    stream: str
    name: str
    said: str
    size: float
    """How far from usual: the order within a rule."""
    since: datetime | None = None
    until: datetime | None = None


class Judged(NamedTuple):
    anomalies: list[Anomaly]
    irregular: list[Series]
    """Topics whose volume is so uneven that its hours are not judged."""
    unjudged: list[Series]
    """Topics with too few like hours to judge them."""


def judge(figures: Figures) -> Judged:
    """All that is unusual, the rules in their order and the largest first."""
    found: list[Anomaly] = []
    irregular: list[Series] = []
    unjudged: list[Series] = []
    for series, hours in sorted(figures.hours.items()):
        first = min(hours)
        line = [(at, hours[at].events if at in hours else 0) for at in figures.clock if at >= first]
        usual = like_hours(line)
        if not usual:
            unjudged.append(series)
            continue
        unusual = list(_uneven(series, line, usual))
        if sum(length for _, length in unusual) > IRREGULAR * len(line):
            irregular.append(series)
            continue
        found += [anomaly for anomaly, _ in unusual]
    for rule in (_heavy_keys, _bursts, _fields, _slow, _lag):
        found += rule(figures)
    order = list(RULES)
    found.sort(key=lambda one: (order.index(one.rule), -one.size, one.stream, one.name))
    return Judged(found, irregular, unjudged)


class Usual(NamedTuple):
    median: float
    deviation: float


def usual(values: Sequence[float]) -> Usual:
    """The median, and a robust standard deviation that is no less than chance makes it."""
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return Usual(middle, max(spread, middle**0.5, 1.0))


def like_hours(line: Sequence[tuple[datetime, int]]) -> dict[datetime, Usual]:
    """What is usual at each hour that has enough like it."""
    narrow: dict[tuple[bool, int], list[int]] = {}
    wide: dict[int, list[int]] = {}
    for at, events in line:
        narrow.setdefault((at.weekday() >= 5, at.hour), []).append(events)
        wide.setdefault(at.hour, []).append(events)
    by_kind = {kind: usual(values) for kind, values in narrow.items() if len(values) >= LIKE_HOURS}
    by_hour = {hour: usual(values) for hour, values in wide.items() if len(values) >= LIKE_HOURS}
    known = {at: by_kind.get((at.weekday() >= 5, at.hour), by_hour.get(at.hour)) for at, _ in line}
    return {at: found for at, found in known.items() if found is not None}


def _uneven(
    series: Series, line: Sequence[tuple[datetime, int]], known: Mapping[datetime, Usual]
) -> Iterator[tuple[Anomaly, int]]:
    """Spikes and silences, each with its number of hours."""

    def is_spike(events: float, of: Usual) -> bool:
        return (
            events >= SPIKE_EVENTS
            and events >= SPIKE_RATIO * of.median
            and events > of.median + SPIKE_SIGMAS * of.deviation
        )

    def is_silence(events: float, of: Usual) -> bool:
        return (
            of.median >= SILENCE_EXPECTED
            and events <= SILENCE_RATIO * of.median
            and events < of.median - SILENCE_SIGMAS * of.deviation
        )

    judged = [(at, events, known[at]) for at, events in line if at in known]
    for rule, is_one in (("spike", is_spike), ("silence", is_silence)):
        for run in runs([(at, is_one(events, of)) for at, events, of in judged]):
            inside = [(events, of) for at, events, of in judged if run.since <= at < run.until]
            events, expected = sum(one for one, _ in inside), sum(of.median for _, of in inside)
            said = f"{_span(run)}: {events:,} events, usual are {expected:,.0f}"
            size = abs(events - expected) / max(expected, 1)
            yield Anomaly(rule, *series, said, size, *run), len(inside)


class Run(NamedTuple):
    """Hours that follow each other."""

    since: datetime
    until: datetime


def runs(flags: Sequence[tuple[datetime, bool]]) -> list[Run]:
    found: list[Run] = []
    for at, raised in flags:
        if not raised:
            continue
        if found and found[-1].until == at:
            found[-1] = found[-1]._replace(until=at + HOUR)
        else:
            found.append(Run(at, at + HOUR))
    return found


def _heavy_keys(figures: Figures) -> Iterator[Anomaly]:
    for series, days in figures.key_days.items():
        if len(days) < KEY_DAYS:
            continue
        tops = {day: found.heaviest[0].events / found.events for day, found in days.items() if found.heaviest}
        usual_share = median(tops.values())
        heavy: dict[str, dict[date, float]] = {}
        for day, found in days.items():
            for one in found.heaviest:
                share = one.events / found.events
                if one.events >= KEY_EVENTS and share >= KEY_SHARE and share >= KEY_RATIO * usual_share:
                    heavy.setdefault(one.key, {})[day] = share
        for key, shares in heavy.items():
            first = min(shares)
            more = f" and {len(shares) - 1} more days" if len(shares) > 1 else ""
            said = (
                f"{first}{more}: key {key} has {max(shares.values()):.0%} of the events,"
                f" usual is {usual_share:.1%} for the heaviest key"
            )
            yield _on(
                "heavy key", series, said, max(shares.values()) / max(usual_share, 1e-6), first, max(shares)
            )


def _bursts(figures: Figures) -> Iterator[Anomaly]:
    for noun, failures in (("dead letters", figures.dead), ("failed requests", figures.requests)):
        for failing, hours in failures.items():
            line = [(at, hours.get(at, 0)) for at in figures.clock]
            of = usual([events for _, events in line])

            def is_burst(events: int, of: Usual = of) -> bool:
                return (
                    events >= BURST_EVENTS
                    and events >= BURST_RATIO * of.median
                    and events > of.median + SPIKE_SIGMAS * of.deviation
                )

            for run in runs([(at, is_burst(events)) for at, events in line]):
                events = sum(count for at, count in line if run.since <= at < run.until)
                where = failing.queue if failing.endpoint is None else f"{failing.queue}, {failing.endpoint}"
                often = f"{events:,} {noun} with “{failing.error}”"
                said = f"{_span(run)}: {often}, usual are {of.median:,.0f} per hour"
                size = events / max(of.median, 1)
                yield Anomaly("burst of errors", failing.stream, where, said, size, *run)


class Seen(NamedTuple):
    """From when to when a field, or a type of one, was seen."""

    first: date
    last: date
    events: int
    share: float
    """Of the payloads from first to last."""


def _fields(figures: Figures) -> Iterator[Anomaly]:
    for series, rows in sorted(figures.fields.items()):
        parsed: dict[date, int] = {}
        by_path: dict[str, dict[str, list[FieldDay]]] = {}
        for row in rows:
            if not row.path:
                parsed[row.day] = parsed.get(row.day, 0) + row.events
            by_path.setdefault(row.path, {}).setdefault(row.type, []).append(row)
        appeared: set[tuple[str, date]] = set()
        vanished: set[tuple[str, date]] = set()
        for path, types in sorted(by_path.items()):
            seen = _seen([row for of_type in types.values() for row in of_type], parsed)
            # What lies in a field that appeared or vanished itself is not named beside it.
            if _missed(seen, parsed, _before(seen.first)):
                appeared.add((path, seen.first))
                if (_parent(path), seen.first) not in appeared:
                    said = (
                        f"{seen.first}: {path} is in {seen.share:.0%} of the payloads, and was in none before"
                    )
                    yield _on("field appeared", series, said, seen.share, seen.first, seen.first)
            if _missed(seen, parsed, _after(seen.last)):
                vanished.add((path, seen.last))
                if (_parent(path), seen.last) not in vanished:
                    said = f"after {seen.last}: {path} is in no payload, and was in {seen.share:.0%} of them"
                    yield _on("field vanished", series, said, seen.share, seen.last, seen.last)
            known = {name: _seen(of_type, parsed) for name, of_type in types.items() if name != "null"}
            yield from _types(series, path, known, parsed)


def _types(
    series: Series, path: str, types: Mapping[str, Seen], parsed: Mapping[date, int]
) -> Iterator[Anomaly]:
    for name, seen in types.items():
        before = sorted(other for other, one in types.items() if other != name and one.first < seen.first)
        if before and _missed(seen, parsed, _before(seen.first)):
            said = (
                f"{seen.first}: {path or 'the payload'} is {_a(name)} in {seen.share:.0%} of the payloads,"
                f" and was {' or '.join(map(_a, before))} before"
            )
            yield _on("field changed type", series, said, seen.share, seen.first, seen.first)


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "ao" else f"a {name}"


def _parent(path: str) -> str:
    """The field that a field lies in."""
    return path.removesuffix("[]") if path.endswith("[]") else path.rpartition(".")[0]


def _seen(rows: Sequence[FieldDay], parsed: Mapping[date, int]) -> Seen:
    first, last = min(row.day for row in rows), max(row.day for row in rows)
    events = sum(row.events for row in rows)
    share = events / sum(n for day, n in parsed.items() if first <= day <= last)
    return Seen(first, last, events, min(1.0, share))


def _before(first: date) -> Callable[[date], bool]:
    return lambda day: day < first


def _after(last: date) -> Callable[[date], bool]:
    return lambda day: day > last


def _missed(seen: Seen, parsed: Mapping[date, int], inside: Callable[[date], bool]) -> bool:
    """Whether it is frequent enough, and days without it had enough payloads, to say so."""
    missing = sum(n for day, n in parsed.items() if inside(day)) * seen.share
    return seen.events >= FIELD_EVENTS and missing >= FIELD_EXPECTED


def _slow(figures: Figures) -> Iterator[Anomaly]:
    for one in figures.endpoints:
        if (
            one.seconds is not None
            and one.attempts >= SLOW_REQUESTS
            and one.seconds.p95 > SLOW_SHARE * one.timeout
        ):
            said = f"5 % of {one.attempts:,} recorded requests take longer than {one.seconds.p95:.1f} s"
            said = f"{said}; its timeout is {one.timeout:g} s"
            yield Anomaly("slow endpoint", one.stream, f"{one.queue}, {one.name}", said, one.seconds.p95)


def _lag(figures: Figures) -> Iterator[Anomaly]:
    for one in figures.queues:
        if one.oldest is not None and one.oldest > LAG and one.waiting and not one.paused:
            hours = one.oldest / HOUR
            said = f"{one.waiting:,} events wait, the oldest for {hours:,.1f} hours"
            yield Anomaly("lag", one.stream, one.name, said, hours)


def _span(run: Run) -> str:
    last = run.until
    until = f"{last:%H:%M}" if (last - HOUR).date() == run.since.date() else f"{last:%Y-%m-%d %H:%M}"
    return f"{run.since:%Y-%m-%d %H:%M} to {until}"


def _on(rule: str, series: Series, said: str, size: float, first: date, last: date) -> Anomaly:
    """Something unusual on days."""
    since, until = (datetime(day.year, day.month, day.day, tzinfo=UTC) for day in (first, last))
    return Anomaly(rule, *series, said, size, since, until + timedelta(days=1))
