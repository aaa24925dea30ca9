"""Outcomes in print, and as JSON with every round and the machine's facts."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import psycopg

from bench.forms import Form
from bench.outcome import Outcome


def table(outcome: Outcome) -> str:
    lines = [f"{outcome.row}: {outcome.what}"]
    if outcome.readings:
        heads = f"{'msgs/s':>10}{'/sCPU':>10}{'spread':>8}{'client/sCPU':>12}{'of bare':>9}{'of PGMQ':>9}"
        lines.append(f"  {'':20}{heads}")
        lines += [_line(outcome, name) for name in outcome.contenders()]
    for check in outcome.checks:
        state = "ok" if check.ok else "short"
        lines.append(f"  {check.name}: {check.figure_text}, goal {check.goal_text}: {state}")
    lines += [f"  {note}" for note in outcome.notes]
    return "\n".join(lines)


def _line(outcome: Outcome, name: str) -> str:
    readings = outcome.of(name)
    rates = [reading.per_cpu for reading in readings]
    middle = outcome.middle(name, "per_cpu")
    client = sum(reading.client_cpu for reading in readings)
    handled = sum(reading.messages for reading in readings)
    return (
        f"  {name:20}{outcome.middle(name, 'per_second'):10,.0f}{middle:10,.0f}"
        f"{(max(rates) - min(rates)) / middle / 2 if middle else 0.0:8.0%}"
        f"{handled / client if client else 0:12,.0f}"
        f"{_ratio(outcome, name, 'bare'):>9}{_ratio(outcome, name, 'pgmq'):>9}"
    )


def _ratio(outcome: Outcome, name: str, other: str) -> str:
    if other not in outcome.contenders():
        return "-"
    return f"{outcome.ratio(name, other):.2f}"


def markdown(outcomes: list[Outcome]) -> str:
    """The checks of all rows as one table, for the documentation."""
    lines = ["| what | figure (quartiles of the rounds) | goal | |", "|---|---|---|---|"]
    for check in (check for outcome in outcomes for check in outcome.checks):
        state = "ok" if check.ok else "**short**"
        lines.append(f"| {check.name} | {check.figure_text} | {check.goal_text} | {state} |")
    return "\n".join(lines) + "\n"


def write_json(path: Path, outcomes: list[Outcome], form: Form, major: int) -> None:
    document = {
        "machine": machine(),
        "postgresql": major,
        "form": form.name,
        "rows": [outcome.as_json() for outcome in outcomes],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    model = "".join(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "cores": os.cpu_count(),
        "cpu": model[: len(model) // (os.cpu_count() or 1)] if model else platform.processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
    }
