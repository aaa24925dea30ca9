"""The page of a report: HTML with inline styles and SVG, no scripts, nothing from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from importlib import resources
from typing import Final, NamedTuple

from pgmb.lake.report.charts import COLOURS, Line, bar, hourly, lines, spark, strip
from pgmb.lake.report.figures import (
    HOUR,
    Failing,
    FieldDay,
    Figures,
    KeyDay,
    Quantiles,
    Series,
)
from pgmb.lake.report.markup import Content, Html, joined, tag
from pgmb.lake.report.rules import IRREGULAR, RULES, Anomaly, Judged, judge

_MOST_ROWS: Final = 40
_MOST_FIELDS: Final = 25
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_TYPES: Final = ("string", "number", "boolean", "object", "array", "null", "unreadable")
_NOT_RECORDED: Final = (
    "pgmb stores no row for an event that was acknowledged, so the delays of those are not known afterwards."
    " Known are: how long events wait now, how old dead letters became, and the delays of requests to"
    " endpoints that record all attempts (log = all)."
)


def render(figures: Figures, judged: Judged | None = None) -> str:
    """The page."""
    found = judge(figures) if judged is None else judged
    style = resources.files("pgmb.lake.report").joinpath("style.css").read_text()
    title = f"pgmb: {', '.join(figures.streams)}"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", f"{title}, {_moment(figures.since)} to {_moment(figures.until)}"),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", title),
            tag(
                "p",
                f"{_moment(figures.since)} to {_moment(figures.until)} UTC,"
                f" taken {_moment(figures.taken_at)}",
                class_="hint",
            ),
        ),
        _tiles(figures, found),
        _summary(figures, found),
        _volume(figures, found.anomalies),
        _delays(figures),
        _failures(figures, found.anomalies),
        _endpoints(figures),
        _keys(figures),
        _fields(figures),
        _rules(),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _tiles(figures: Figures, judged: Judged) -> Html:
    events = sum(one.events for hours in figures.hours.values() for one in hours.values())
    size = sum(one.bytes for hours in figures.hours.values() for one in hours.values())
    dead = sum(sum(hours.values()) for hours in figures.dead.values())
    unusual = len(judged.anomalies)
    tiles = [
        ("Events", _count(events), None),
        ("Volume", _bytes(size), None),
        ("Topics", _count(len(figures.hours)), None),
        ("Dead letters", _count(dead), None),
        ("Failed requests", _count(sum(sum(hours.values()) for hours in figures.requests.values())), None),
        ("Unusual", _count(unusual), "warn" if unusual else None),
    ]
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value), class_=kind) for name, value, kind in tiles),
        class_="tiles",
    )


def _summary(figures: Figures, judged: Judged) -> Html:
    listed = [
        tag(
            "li",
            tag("span", one.rule, class_="badge"),
            tag("b", f"{one.stream}: {one.name}" if len(figures.streams) > 1 else one.name),
            tag("div", one.said),
        )
        for one in judged.anomalies
    ]
    notes: list[str] = []
    if judged.irregular:
        names = _named(judged.irregular, figures)
        notes.append(
            f"More than {IRREGULAR:.0%} of the hours of {names} are unusual: these topics are irregular,"
            " and not judged by the hour."
        )
    if judged.unjudged:
        names = _named(judged.unjudged, figures)
        notes.append(f"The time is too short to judge hours of {names}: that takes 5 days.")
    return _panel(
        "What is unusual",
        tag("ul", *listed, class_="findings")
        if listed
        else tag("p", "Nothing is unusual by the rules at the end of this page.", class_="fine"),
        *(tag("p", note, class_="hint") for note in notes),
    )


def _volume(figures: Figures, anomalies: Sequence[Anomaly]) -> Html:
    clock = figures.clock
    charts: list[Html] = []
    for stream in figures.streams:
        topics = [series for series in _largest(figures) if series.stream == stream]
        for attribute, show in (("events", _short), ("bytes", _bytes)):
            drawn = [Line(one.topic, _summed(figures, [one], attribute)) for one in topics[: COLOURS - 1]]
            if rest := topics[COLOURS - 1 :]:
                drawn.append(Line(f"{len(rest):,} other topics", _summed(figures, rest, attribute)))
            if drawn:
                name = f"{stream}: {attribute} per hour"
                charts += [tag("h3", name), lines(clock, drawn, show, name)]
    rows: list[list[Content]] = []
    every = sum(volume.events for hours in figures.hours.values() for volume in hours.values())
    for series in _largest(figures):
        hours = figures.hours[series]
        events = sum(volume.events for volume in hours.values())
        size = sum(volume.bytes for volume in hours.values())
        marked = [
            hourly(clock, at)
            for one in anomalies
            if (one.stream, one.name) == series and one.rule in ("spike", "silence")
            for at in clock
            if one.since is not None and one.until is not None and one.since <= at < one.until
        ]
        values = [hours[at].events if at in hours else 0 for at in clock]
        rows.append(
            [
                series.stream,
                series.topic,
                _count(events),
                f"{events / every:.1%}",
                _bytes(size),
                _bytes(size / events),
                spark(values, marked, f"events of {series.topic} per hour"),
            ]
        )
    columns = ["stream", "topic", "events#", "share#", "volume#", "per event#", "events per hour"]
    return _panel("Events by stream and topic", *charts, _table(columns, rows, "No events in this time."))


def _largest(figures: Figures) -> list[Series]:
    """Topics, those with most events first."""
    return sorted(
        figures.hours, key=lambda series: (-sum(one.events for one in figures.hours[series].values()), series)
    )


def _summed(figures: Figures, chosen: Iterable[Series], attribute: str) -> list[int]:
    """Events or bytes of topics, by the hour."""
    clock = figures.clock
    values = [0] * len(clock)
    for series in chosen:
        for at, volume in figures.hours[series].items():
            values[hourly(clock, at)] += getattr(volume, attribute)
    return values


def _delays(figures: Figures) -> Html:
    queues = [
        [
            one.stream,
            one.name,
            _bound(one.waiting, "waiting" in one.at_least),
            "" if one.oldest is None else _span(one.oldest),
            _bound(one.retries, "retries" in one.at_least),
            _bound(one.dead, "dead" in one.at_least),
            "paused" if one.paused else "",
        ]
        for one in figures.queues
    ]
    deaths = [
        [*where, *_quantile_cells(found)]
        for where, found in sorted(figures.deaths.items(), key=lambda one: -one[1].events)
    ]
    delivered = [
        [one.stream, f"{one.queue}, {one.name}", *_quantile_cells(one.delay)]
        for one in figures.endpoints
        if one.delay
    ]
    columns = ["stream", "queue", "events#", "median#", "p95#", "p99#", "most#"]
    return _panel(
        "Delays by queue",
        tag("p", _NOT_RECORDED, class_="hint"),
        tag("h3", "Queues now"),
        _table(
            ["stream", "queue", "waiting#", "oldest#", "retries#", "dead letters#", ""],
            queues,
            "There are no queues.",
        ),
        tag("h3", "From publication to delivery, endpoints that record all attempts"),
        _table(columns, delivered, "No such delivery was recorded in this time."),
        tag("h3", "From publication to death, dead letters"),
        _table(columns, deaths, "No event died in this time."),
    )


def _failures(figures: Figures, anomalies: Sequence[Anomaly]) -> Html:
    clock = figures.clock
    total: dict[str, list[int]] = {}
    rows: list[tuple[int, list[Content]]] = []
    for noun, failures in (("dead letters", figures.dead), ("failed requests", figures.requests)):
        for failing, hours in failures.items():
            values = [hours.get(at, 0) for at in clock]
            total[noun] = [a + b for a, b in zip(total.get(noun, [0] * len(clock)), values, strict=True)]
            marked = [
                place
                for place, at in enumerate(clock)
                for one in anomalies
                if one.rule == "burst of errors"
                and one.stream == failing.stream
                and failing.error in one.said
                if one.since is not None and one.until is not None and one.since <= at < one.until
            ]
            events = sum(values)
            row = [*_where(failing), noun, _count(events), spark(values, marked, f"{failing.error} per hour")]
            rows.append((events, row))
    rows.sort(key=lambda row: -row[0])
    waiting = [
        [
            *_where(one.failing),
            _count(one.events),
            one.attempts,
            "" if one.oldest is None else _span(one.oldest),
        ]
        for one in figures.retries
    ]
    chart = (
        lines(clock, [Line(noun, values) for noun, values in total.items()], _short, "failures per hour")
        if total
        else None
    )
    return _panel(
        "Retries and dead letters by error",
        tag(
            "p",
            "Numbers, quoted text and ids in errors are shown as …, so that equal errors count together.",
            class_="hint",
        ),
        chart,
        _table(
            ["stream", "queue", "error!", "what", "events#", "per hour"],
            [row for _, row in rows],
            "Nothing failed.",
        ),
        tag("h3", "Waiting to be tried again now"),
        _table(
            ["stream", "queue", "error!", "events#", "most attempts#", "oldest#"],
            waiting,
            "No event waits for a retry.",
        ),
    )


def _endpoints(figures: Figures) -> Html:
    rows = [
        [
            one.name,
            one.queue,
            _count(one.attempts),
            f"{one.failed / one.attempts:.1%}",
            *_quantile_cells(one.seconds)[1:],
            f"{one.timeout:g} s",
            one.log,
        ]
        for one in figures.endpoints
    ]
    return _panel(
        "Endpoints, the slowest first",
        tag(
            "p", "Of recorded requests. An endpoint with log = failures records failures only.", class_="hint"
        ),
        _table(
            [
                "endpoint",
                "queue",
                "requests#",
                "failed#",
                "median#",
                "p95#",
                "p99#",
                "most#",
                "timeout#",
                "log",
            ],
            rows,
            "No request was recorded in this time.",
        ),
    )


def _keys(figures: Figures) -> Html:
    rows: list[tuple[float, list[Content]]] = []
    for series, found in figures.keys.items():
        top, share = found.heaviest[0], found.heaviest[0].events / found.events
        tenth = sum(one.events for one in found.heaviest) / found.events
        rows.append(
            (
                share,
                [
                    series.stream,
                    series.topic,
                    _count(found.keys),
                    top.key,
                    _count(top.events),
                    f"{share:.1%}",
                    bar(share, f"{share:.0%}"),
                    f"{tenth:.1%}" if found.keys > len(found.heaviest) else "100 %",
                    f"{_ratio(found):,.1f}",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    return _panel(
        "Heavy keys",
        tag(
            "p",
            "Skew is the heaviest key's events over the mean of all keys. An ordered queue works on one event"
            " of a key at a time, and a task of Spark holds all of a key.",
            class_="hint",
        ),
        _table(
            ["stream", "topic", "keys#", "heaviest key", "events#", "share#", "", "ten heaviest#", "skew#"],
            [row for _, row in rows],
            "No event has a key.",
        ),
    )


def _ratio(found: KeyDay) -> float:
    return found.heaviest[0].events * found.keys / found.events


class _Field(NamedTuple):
    path: str
    types: list[str]
    share: float
    days: list[tuple[float, int]]
    changed: bool


def _fields(figures: Figures) -> Html:
    days = sorted({at.date() for at in figures.clock})
    parts: list[Html] = []
    for series, rows in sorted(figures.fields.items()):
        fields = _described(rows, days)
        # Those that changed, and then the others in their order.
        shown = sorted(fields, key=lambda one: not one.changed)[:_MOST_FIELDS]
        table = _table(
            ["field", "types", "share#", "by day"],
            [
                [
                    tag("code", one.path or "(payload)"),
                    ", ".join(one.types),
                    f"{one.share:.0%}",
                    strip(one.days, f"{one.path} by day"),
                ]
                for one in sorted(shown, key=lambda one: one.path)
            ],
            "",
        )
        left = len(fields) - len(shown)
        parts += [tag("h3", f"{series.stream}: {series.topic}"), table]
        if left:
            parts.append(tag("p", f"{left} more fields did not change.", class_="hint"))
    legend = tag(
        "ul", *(tag("li", tag("i", class_=f"s{n}"), name) for n, name in enumerate(_TYPES)), class_="legend"
    )
    how = (
        "Every payload was parsed."
        if figures.sample == 1
        else f"One payload in {figures.sample:,} was parsed."
    )
    hint = (
        f"{how} A day has the colour of the field's commonest type, the stronger the more payloads have it."
    )
    return _panel(
        "Fields of payloads",
        tag("p", hint, class_="hint"),
        *([legend, *parts] if parts else [tag("p", "No payload was parsed.", class_="hint")]),
    )


def _described(rows: Sequence[FieldDay], days: Sequence[date]) -> list[_Field]:
    parsed: dict[date, int] = {}
    by_path: dict[str, dict[date, dict[str, int]]] = {}
    for row in rows:
        if not row.path:
            parsed[row.day] = parsed.get(row.day, 0) + row.events
        by_path.setdefault(row.path, {}).setdefault(row.day, {})[row.type] = row.events
    every = sum(parsed.values())
    found: list[_Field] = []
    for path, by_day in by_path.items():
        types = sorted({name for counts in by_day.values() for name in counts})
        drawn: list[tuple[float, int]] = []
        for day in days:
            counts = by_day.get(day, {})
            # Null only where there is nothing else.
            main = max(counts, key=lambda name: (name != "null", counts[name]), default="")
            share = min(1.0, sum(counts.values()) / parsed[day]) if counts else 0.0
            drawn.append((share, _TYPES.index(main) if main else 0))
        seen = [day for day in days if day in parsed]
        present = {day: frozenset(by_day.get(day, ())) - {"null"} for day in seen}
        changed = len({bool(by_day.get(day)) for day in seen}) > 1 or len(set(present.values())) > 1
        share = min(1.0, sum(sum(counts.values()) for counts in by_day.values()) / every)
        found.append(_Field(path, types, share, drawn, changed))
    return found


def _rules() -> Html:
    listed = [part for name, text in RULES.items() for part in (tag("dt", name), tag("dd", text))]
    return _panel("The rules", tag("dl", *listed, class_="rules"))


# -- Parts ---------------------------------------------------------------------------------------------------


def _panel(title: str, *content: Html | None) -> Html:
    return tag("section", tag("h2", title), *content, class_="panel")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Content]], empty: str) -> Html:
    """A column whose name ends with # has numbers, with ! errors."""
    if not rows:
        return tag("p", empty, class_="hint")
    kinds = {"#": "n", "!": "error"}
    classes = [kinds.get(name[-1:], "name") for name in columns]
    head = [
        tag("th", name.rstrip("#!"), class_="n" if kind == "n" else None)
        for name, kind in zip(columns, classes, strict=True)
    ]
    body = [
        tag("tr", *(tag("td", value, class_=kind) for value, kind in zip(row, classes, strict=True)))
        for row in rows[:_MOST_ROWS]
    ]
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    more = len(rows) - len(body)
    return joined(
        tag("div", table, class_="scroll"),
        tag("p", f"{more:,} more rows are left out.", class_="hint") if more else None,
    )


def _where(failing: Failing) -> list[Content]:
    place = failing.queue if failing.endpoint is None else f"{failing.queue}, {failing.endpoint}"
    return [failing.stream, place, failing.error]


def _quantile_cells(found: Quantiles | None) -> list[Content]:
    if found is None:
        return ["0", "", "", "", ""]
    return [_count(found.events), *(_seconds(value) for value in found[1:])]


def _named(chosen: Sequence[Series], figures: Figures) -> str:
    few = [f"{one.stream}: {one.topic}" if len(figures.streams) > 1 else one.topic for one in chosen[:5]]
    more = f" and {len(chosen) - 5} more" if len(chosen) > 5 else ""
    return ", ".join(few) + more


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M}"


def _count(value: int) -> str:
    return f"{value:,}"


def _bound(value: int, at_least: bool) -> str:
    return f"≥ {value:,}" if at_least else f"{value:,}"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:g} {unit}"
    return f"{value:,g}"


def _bytes(value: float) -> str:
    scaled, unit = float(value), 0
    while scaled >= 1000 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{scaled:.0f} {_UNITS[unit]}" if unit == 0 or scaled >= 100 else f"{scaled:.3g} {_UNITS[unit]}"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 60 else _span(timedelta(seconds=value))


def _span(value: timedelta) -> str:
    seconds = value.total_seconds()
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{value / HOUR:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
