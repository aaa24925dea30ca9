"""Charts as inline SVG, without scripts. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from statistics import median
from typing import Final, NamedTuple

from pgmb.lake.report.figures import HOUR
from pgmb.lake.report.markup import Html, joined, tag

COLOURS: Final = 8
_WIDTH: Final = 720
_HEIGHT: Final = 170
_LEFT: Final = 52
_BOTTOM: Final = 18
_TOP: Final = 8
_DAYS_LABELLED: Final = 8


class Line(NamedTuple):
    """A name, and a value for each hour of the chart."""

    name: str
    values: Sequence[float]


def lines(clock: Sequence[datetime], drawn: Sequence[Line], show: Callable[[float], str], label: str) -> Html:
    """A line chart over hours, with a legend."""
    step = max(1, math.ceil(len(clock) / _WIDTH))
    shown = [Line(one.name, _thinned(one.values, step)) for one in drawn]
    most = max((value for one in shown for value in one.values), default=0) or 1
    ticks = _ticks(most)
    top = max(ticks[-1], most)
    width, height = _WIDTH - _LEFT, _HEIGHT - _TOP - _BOTTOM

    def across(place: float, count: int) -> float:
        return _LEFT + width * (place + 0.5) / max(count, 1)

    def down(value: float) -> float:
        return _TOP + height * (1 - value / top)

    parts: list[Html] = []
    for value in ticks:
        y = down(value)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", show(value), x=_LEFT - 6, y=y + 3.5, text_anchor="end", class_="axis"))
    for place, text in _days(clock):
        x = across(place, len(clock))
        parts.append(tag("text", text, x=x, y=_HEIGHT - 4, text_anchor="middle", class_="axis"))
    for number, one in enumerate(shown):
        points = [(across(place, len(one.values)), down(value)) for place, value in enumerate(one.values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if len(shown) == 1 and points:
            base = _TOP + height
            area = f"{points[0][0]:.1f},{base} {path} {points[-1][0]:.1f},{base}"
            parts.append(tag("polygon", points=area, class_=f"area s{number % COLOURS}"))
        parts.append(tag("polyline", points=path, class_=f"line s{number % COLOURS}"))
    legend = [tag("li", tag("i", class_=f"s{n % COLOURS}"), one.name) for n, one in enumerate(shown)]
    return joined(
        tag(
            "svg",
            *parts,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            class_="lines",
            role="img",
            aria_label=label,
        ),
        tag("ul", *legend, class_="legend") if len(drawn) > 1 else None,
    )


def spark(values: Sequence[float], marked: Sequence[int] = (), label: str = "") -> Html:
    """A line of a table's row; places that are marked have a dot."""
    width, height, count = 220, 26, len(values)
    step = max(1, math.ceil(count / width))
    thinned = _thinned(values, step)
    most = max(thinned, default=0) or 1

    def point(place: int, value: float) -> tuple[float, float]:
        return width * (place + 0.5) / max(len(thinned), 1), 2 + (height - 4) * (1 - value / most)

    path = " ".join("{:.1f},{:.1f}".format(*point(*one)) for one in enumerate(thinned))
    dots: list[Html] = []
    for place in sorted({place // step for place in marked}):
        x, y = point(place, thinned[place])
        dots.append(tag("circle", cx=x, cy=y, r=2.4, class_="mark"))
    return tag(
        "svg",
        tag("polyline", points=path, class_="line s0"),
        *dots,
        viewBox=f"0 0 {width} {height}",
        class_="spark",
        role="img",
        aria_label=label,
    )


def bar(share: float, label: str) -> Html:
    """A share of 1 as a bar."""
    return tag(
        "svg",
        tag("rect", width=100, height=8, class_="ground"),
        tag("rect", width=100 * max(0.0, min(1.0, share)), height=8, class_="bar"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="track",
        role="img",
        aria_label=label,
    )


def strip(days: Sequence[tuple[float, int]], label: str) -> Html:
    """A day after the other: how much of a whole (0 to 1), and of which colour."""
    size = 7
    cells = [
        tag("rect", x=place * size, width=size - 1, height=12, class_="ground")
        if share <= 0
        else tag(
            "rect",
            x=place * size,
            width=size - 1,
            height=12,
            class_=f"cell s{colour % COLOURS}",
            fill_opacity=0.35 + 0.65 * min(1.0, share),
        )
        for place, (share, colour) in enumerate(days)
    ]
    width = max(1, len(days)) * size
    return tag(
        "svg",
        *cells,
        viewBox=f"0 0 {width} 12",
        width=width,
        height=12,
        class_="strip",
        role="img",
        aria_label=label,
    )


def _thinned(values: Sequence[float], step: int) -> list[float]:
    """No more values than there are pixels, each the most unusual of those that it stands for."""
    middle = median(values) if values else 0
    return [
        max(values[at : at + step], key=lambda value: abs(value - middle))
        for at in range(0, len(values), step)
    ]


def _ticks(most: float) -> list[float]:
    """0 and up to four round steps, the last at or above the highest value."""
    size = 10 ** math.floor(math.log10(most / 4)) if most > 0 else 1
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if size * factor * 4 >= most)
    if most >= 4:
        step = max(1, step if step < 1 or step == int(step) else math.ceil(step))
    return [step * number for number in range(math.ceil(most / step) + 1)]


def _days(clock: Sequence[datetime]) -> list[tuple[float, str]]:
    """Labels of the time: hours for up to two days, otherwise days."""
    if len(clock) <= 48:
        every = max(1, math.ceil(len(clock) / _DAYS_LABELLED))
        return [(place, f"{clock[place]:%H:%M}") for place in range(0, len(clock), every)]
    starts = [place for place, at in enumerate(clock) if at.hour == 0]
    every = max(1, math.ceil(len(starts) / _DAYS_LABELLED))
    return [(place, f"{clock[place].day} {clock[place]:%b}") for place in starts[::every]]


def hourly(clock: Sequence[datetime], at: datetime) -> int:
    """The place of a time in a clock."""
    return (at - clock[0]) // HOUR
