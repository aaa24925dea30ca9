"""How values are shown: numbers, ages, sizes, moments. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from markupsafe import Markup

from pgmb.server.dashboard.retries import duration

NONE = Markup('<span class="none">&ndash;</span>')

_COUNTED_UPTO = 10_000


def number(value: float | None) -> str | Markup:
    return NONE if value is None else f"{value:,.0f}"


def counted(value: int | None) -> str | Markup:
    """A number that is counted up to 10,000."""
    if value is None:
        return NONE
    return f"{_COUNTED_UPTO:,}+" if value >= _COUNTED_UPTO else f"{value:,}"


def rate(value: float | None) -> str | Markup:
    if value is None:
        return NONE
    if value == 0:
        return Markup('<span class="zero">0</span><span class="unit">/s</span>')
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"
    return Markup('{}<span class="unit">/s</span>').format(shown)


def seconds(value: timedelta | float | None) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else value


def age(value: timedelta | float | None) -> str | Markup:
    """A duration by its two largest units."""
    duration = seconds(value)
    if duration is None:
        return NONE
    if duration < 0:
        return f"-{age(-duration)}"
    if duration < 1:
        return f"{duration * 1000:.0f} ms"
    if duration < 10:
        return f"{duration:.1f} s"
    whole = round(duration)
    for size, unit, smaller, sub in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {sub}" if rest else "")
    return f"{whole} s"


def roughly(value: timedelta | float | None) -> str | Markup:
    """A duration by one unit, for where there is little room."""
    span = seconds(value)
    if span is None or span < 60:
        return age(span)
    for unit_size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if span >= unit_size:
            return Markup('{:.1f}<span class="unit"> {}</span>').format(span / unit_size, unit)
    raise AssertionError


def interval(text: str | None) -> str | Markup:
    """A duration that PostgreSQL wrote as ISO 8601."""
    return NONE if text is None else age(duration(text))


def size(value: float | None) -> str | Markup:
    if value is None:
        return NONE
    amount = float(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            shown = f"{amount:.0f}" if unit == "B" or amount >= 100 else f"{amount:.1f}"
            return Markup('{}<span class="unit"> {}</span>').format(shown, unit)
        amount /= 1000
    raise AssertionError


def moment(value: datetime | float | str | None) -> Markup:
    """A point in time: how long ago, with the time itself at hand. The script keeps it right."""
    if value is None:
        return NONE
    at = when(value)
    ago = (datetime.now(UTC) - at).total_seconds()
    said = f"in {_about(-ago)}" if ago < 0 else f"{_about(ago)} ago" if ago >= 1 else "now"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at.isoformat(), clock(at), said)


def _about(span: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if span >= size:
            return f"{span // size:.0f} {unit}"
    return f"{span:.0f} s"


def clock(value: datetime | float | str | None) -> str | Markup:
    """A point in time, to the millisecond."""
    if value is None:
        return NONE
    return when(value).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def when(value: datetime | float | str) -> datetime:
    if isinstance(value, str):
        return datetime.fromisoformat(value).astimezone(UTC)
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return datetime.fromtimestamp(value, UTC)


def short(value: str | None, most: int = 80) -> str | Markup:
    """The beginning of a text, and all of it (within reason) when pointed at."""
    if value is None:
        return NONE
    if len(value) <= most:
        return Markup("<bdi>{}</bdi>").format(value)
    title = value if len(value) <= 1000 else value[:1000] + "…"
    return Markup('<bdi title="{}">{}…</bdi>').format(title, value[:most])


def plural(count: float, one: str, many: str | None = None) -> str:
    return f"{count:,.0f} {one if count == 1 else many or one + 's'}"


def patterns(values: list[str] | None) -> Markup:
    if not values:
        return NONE
    return Markup(" ").join(Markup('<code class="pattern">{}</code>').format(value) for value in values)


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number,
    "counted": counted,
    "rate": rate,
    "age": age,
    "roughly": roughly,
    "interval": interval,
    "size": size,
    "moment": moment,
    "clock": clock,
    "short": short,
    "plural": plural,
    "patterns": patterns,
}
