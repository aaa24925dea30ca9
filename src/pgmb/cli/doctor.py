"""pgmb doctor."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import psycopg
import typer
from rich.table import Table
from rich.text import Text

from pgmb._core.connecting import connect
from pgmb.cli import durations, hints, output
from pgmb.cli.options import AsJson, Dsn
from pgmb.doctor import Finding, Level, Limits, examine

_STYLES = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.SKIP: "dim",
    Level.WARN: "yellow",
    Level.FAIL: "bold red",
}
_COULD_NOT_CHECK = 3


class FailOn(StrEnum):
    WARN = "warn"
    FAIL = "fail"


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    dsn: Dsn = "",
    fail_on: Annotated[
        FailOn, typer.Option(metavar="warn|fail", help="The lowest level that sets exit code 1.")
    ] = FailOn.WARN,
    pinned_for: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="The maximum age of a transaction.",
            show_default="5m",
        ),
    ] = None,
    standing_for: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="The longest time an event may wait for a consumer.",
            show_default="5m",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List problems and how to fix them. Exit code: 0 healthy, 1 problems found, 3 could not check."""
    usual = Limits()
    limits = Limits(
        pinned_for=usual.pinned_for if pinned_for is None else pinned_for,
        standing_for=usual.standing_for if standing_for is None else standing_for,
        waiting_for=usual.waiting_for if standing_for is None else standing_for,
        unarchived_for=usual.unarchived_for if standing_for is None else standing_for,
        held_for=usual.held_for if standing_for is None else standing_for,
    )
    try:
        with connect(dsn, "pgmb doctor", prepare_threshold=None) as conn:
            findings = examine(conn, limits)
    except psycopg.Error as error:
        output.fail(*hints.connection_failure(error), _COULD_NOT_CHECK)
    if as_json:
        output.json(findings)
    else:
        _print(findings)
    problems = {Level.FAIL} if fail_on is FailOn.FAIL else {Level.FAIL, Level.WARN}
    raise typer.Exit(1 if any(finding.level in problems for finding in findings) else 0)


def _print(findings: list[Finding]) -> None:
    console = output.console()
    if sys.stdout.isatty():
        console.print(_grid(findings))
    else:
        for finding in findings:
            fix = f" Fix: {finding.fix}" if finding.fix else ""
            output.line(output.printable(f"{finding.level:<5} {finding.check:<17} {finding.message}{fix}"))
    counts = Counter(finding.level for finding in findings)
    console.print(", ".join(f"{counts[level]} {level}" for level in reversed(Level) if counts[level]))


def _grid(findings: list[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for wrapped in (False, False, True):
        grid.add_column(no_wrap=not wrapped, overflow="fold")
    for finding in findings:
        told = Text(output.printable(finding.message))
        if finding.fix:
            told.append(f"\n→ {output.printable(finding.fix)}", style="bold" if finding.problem else "dim")
        grid.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, told)
    return grid
