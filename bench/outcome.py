"""What a measurement yields: readings of each round, and checks against the goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True)
class Reading:
    """One contender in one round."""

    contender: str
    messages: int
    wall: float
    server_cpu: float
    """Seconds of all of the server's processes, or of the backend where the row says so."""
    client_cpu: float
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        return self.messages / self.wall if self.wall else 0.0

    @property
    def per_cpu(self) -> float:
        return self.messages / self.server_cpu if self.server_cpu else 0.0


@dataclass(frozen=True)
class Check:
    """One figure against its goal."""

    name: str
    figure: float
    goal: float
    at_least: bool = True
    unit: str = "x"
    rounds: tuple[float, float] | None = None
    """The quartiles of the rounds' figures: how steady it is."""

    @property
    def ok(self) -> bool:
        return self.figure >= self.goal if self.at_least else self.figure <= self.goal

    @property
    def figure_text(self) -> str:
        spread = "" if self.rounds is None else f" ({self.rounds[0]:.2f}-{self.rounds[1]:.2f})"
        return f"{self.figure:.2f}{self.unit}{spread}"

    @property
    def goal_text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.goal:g}{self.unit}"


@dataclass
class Outcome:
    """One row of the benchmark."""

    row: str
    what: str
    readings: list[Reading] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def contenders(self) -> list[str]:
        return list(dict.fromkeys(reading.contender for reading in self.readings))

    def of(self, contender: str) -> list[Reading]:
        return [reading for reading in self.readings if reading.contender == contender]

    def figures(self, contender: str, figure: str) -> list[float]:
        """Of each round: `per_cpu`, `per_second` or something in `extra`."""
        return [
            reading.extra[figure] if figure in reading.extra else getattr(reading, figure)
            for reading in self.of(contender)
        ]

    def middle(self, contender: str, figure: str) -> float:
        return median(self.figures(contender, figure))

    def ratios(self, contender: str, other: str, figure: str = "per_cpu") -> list[float]:
        """Round by round: what disturbed one of a round most likely disturbed the other."""
        pairs = zip(self.figures(contender, figure), self.figures(other, figure), strict=True)
        return [mine / theirs if theirs else inf for mine, theirs in pairs]

    def ratio(self, contender: str, other: str, figure: str = "per_cpu") -> float:
        return median(self.ratios(contender, other, figure))

    def compare(
        self, name: str, mine: str, other: str, goal: float, figure: str = "per_cpu", *, at_least: bool = True
    ) -> Check:
        """A check of the ratio of two contenders."""
        ratios = self.ratios(mine, other, figure)
        low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Check(name, median(ratios), goal, at_least, rounds=(low, high))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"checks": [asdict(check) | {"ok": check.ok} for check in self.checks]}
