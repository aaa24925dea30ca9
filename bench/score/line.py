"""A line of the scorecard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    name: str
    figure: str
    goal: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name:38} {self.figure:44} goal {self.goal:16} {'ok' if self.ok else 'short'}"


def missing(name: str, goal: str, why: str = "missing") -> Line:
    """What cannot be shown falls short."""
    return Line(name, f"short: {why}", goal, ok=False)
