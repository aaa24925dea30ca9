"""Values as the pages show them: numbers, times, JSON trees and retry schedules. No I/O."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from pgmb._core.masking import printable_json

NONE = Markup('<span class="none">&ndash;</span>')


def number(value: float | None) -> str | Markup:
    return NONE if value is None else f"{value:,.0f}"


def figure(row: Mapping[str, Any] | msgspec.Struct, field: str) -> str | Markup:
    """A count of a row that names those that are only a bound: `10,000+` or `≤ 500`."""
    if isinstance(row, msgspec.Struct):
        row = msgspec.structs.asdict(row)
    if field in row.get("at_least", ()):
        return f"{number(row[field])}+"
    return f"≤ {number(row[field])}" if field in row.get("at_most", ()) else number(row[field])


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
    """A duration in its two largest units."""
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
    """A duration in one unit, for narrow columns."""
    span = seconds(value)
    if span is None or span < 60:
        return age(span)
    for unit_size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if span >= unit_size:
            return Markup('{:.1f}<span class="unit"> {}</span>').format(span / unit_size, unit)
    raise AssertionError


def interval(text: str | None) -> str | Markup:
    """An ISO 8601 duration of PostgreSQL."""
    return NONE if text is None else age(iso_seconds(text))


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
    """A time as its age, with the exact time as a tooltip. The script updates it."""
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
    """A time to the millisecond."""
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
    """The beginning of a text, with the rest (within limits) as a tooltip."""
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
    "figure": figure,
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


_MOST_NODES = 1500
_MOST_TEXT = 500
_DEEPEST = 40
_MOST_RAW = 100_000
_UNFOLDED = 3
"""Levels of a tree that are unfolded initially."""


class Node(msgspec.Struct):
    """A value in a tree. `kind` selects its style."""

    kind: Literal["object", "array", "string", "number", "word", "cut"]
    name: str | None
    text: str
    more: int = 0
    """The number of characters or members left out."""
    size: int = 0
    children: list[Any] = msgspec.field(default_factory=list[Any])
    open: bool = False


class JsonDocument(msgspec.Struct, frozen=True):
    """A JSON text: its tree, if it can be parsed, and the text itself, truncated if very long."""

    tree: Node | None
    raw: str
    bytes: int
    cut: bool
    pretty: str | None


def parse_json(text: str) -> JsonDocument:
    size = len(text.encode("utf-8", "replace"))
    raw = text[:_MOST_RAW]
    try:
        value = msgspec.json.decode(text)
        tree = _Tree().node(None, value, 0)
        pretty = msgspec.json.format(text, indent=2) if size <= _MOST_RAW else None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        # Nested too deeply, or with lone surrogates, which JSON allows: only the text is shown.
        tree, pretty = None, None
    return JsonDocument(tree, raw, size, len(text) > _MOST_RAW, pretty)


class _Tree:
    def __init__(self) -> None:
        self._left = _MOST_NODES

    def node(self, name: str | None, value: Any, depth: int) -> Node:
        self._left -= 1
        name = name if name is None or len(name) <= _MOST_TEXT else name[:_MOST_TEXT] + "…"
        if _is_instance(value, dict):
            return self._members("object", name, list(value.items()), depth)
        if _is_instance(value, list):
            return self._members("array", name, [(None, member) for member in value], depth)
        if isinstance(value, str):
            return Node("string", name, value[:_MOST_TEXT], max(0, len(value) - _MOST_TEXT))
        if isinstance(value, bool) or value is None:
            return Node("word", name, {True: "true", False: "false", None: "null"}[value])
        return Node("number", name, msgspec.json.encode(value).decode()[:_MOST_TEXT])

    def _members(
        self,
        kind: Literal["object", "array"],
        name: str | None,
        members: list[tuple[str | None, Any]],
        depth: int,
    ) -> Node:
        found = Node(kind, name, "", size=len(members), open=depth < _UNFOLDED)
        for place, (key, value) in enumerate(members):
            if self._left <= 0 or depth >= _DEEPEST:
                found.children.append(Node("cut", None, "", more=len(members) - place))
                break
            found.children.append(self.node(key, value, depth + 1))
        return found


def curl(base: str, stream: str, event: dict[str, Any]) -> str | None:
    """A curl command that publishes the event again; None if it would be too long."""
    payload = event["payload"]
    if len(payload) > _MOST_RAW:
        return None
    fields = [f'"topic":{_json(event["topic"])}']
    if event["key"] is not None:
        fields.append(f'"key":{_json(event["key"])}')
    fields.append(f'"payload":{payload}')
    if event["headers"]:
        fields.append(f'"headers":{event["headers"]}')
    body = "{" + ",".join(fields) + "}"
    address = f"{base.rstrip('/')}/v1/streams/{quote(stream, safe='')}/events"
    return (
        f"curl -X POST {shlex.quote(address)} \\\n"
        '  -H "Authorization: Bearer $PGMB_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        # A terminal acts on control characters while the command is pasted, whatever the quotes.
        f"  -d {shlex.quote(printable_json(body))}"
    )


def _is_instance(value: object, kind: type) -> bool:
    """`isinstance` that does not narrow the type of the value for type checkers."""
    return isinstance(value, kind)


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


_ISO_DURATION = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?[\d.]+)S)?)?"
)
_ISO_SECONDS = (365.25 * 86400, 30 * 86400, 86400, 3600, 60, 1)
_MOST_STEPS = 12


class RetryStep(msgspec.Struct, frozen=True):
    """The wait after a failed attempt, and the total since the first."""

    attempt: int
    wait: float
    total: float


def retry_schedule(settings: dict[str, Any]) -> list[RetryStep]:
    """A queue's retry waits without jitter, at most a dozen."""
    base, most = iso_seconds(settings["backoff_base"]), iso_seconds(settings["backoff_max"])
    factor, attempts = float(settings["backoff_factor"]), int(settings["max_attempts"])
    steps: list[RetryStep] = []
    total = 0.0
    for attempt in range(1, min(attempts, _MOST_STEPS + 1)):
        # Avoids an overflow of the power.
        exponent = min(attempt - 1, 300)
        wait = min(base * min(factor, 1e9) ** min(exponent, 30), most)
        total += wait
        steps.append(RetryStep(attempt, wait, total))
    return steps


def iso_seconds(text: str | None) -> float:
    """The seconds of an ISO 8601 duration of PostgreSQL."""
    found = _ISO_DURATION.fullmatch(text or "")
    if found is None:
        return 0.0
    return sum(
        float(part) * size
        for part, size in zip(found.groups(), _ISO_SECONDS, strict=True)
        if part is not None
    )
