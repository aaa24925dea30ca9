"""What lines come from: rows of the benchmark, and programs that prove something."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.forms import FORMS, Form
from bench.ground import Ground
from bench.outcome import Check, Outcome
from bench.revision import NotMeasurableError
from bench.score.line import Line, missing

ROOT = Path(__file__).parents[2]

_PYTEST_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|xfailed|xpassed)\b")

_CLUSTER = threading.Lock()


@dataclass(frozen=True)
class Measured:
    """A row of the benchmark. `checks` are the names it must give: one that is not given falls short."""

    row: str
    checks: Sequence[str]
    run: Callable[[Ground, Form], Outcome]

    def lines(self, ground: Ground, full: bool) -> list[Line]:
        try:
            outcome = self.run(ground, FORMS["full" if full else "brief"])
        except NotMeasurableError as error:
            return [missing(name, "-", str(error)) for name in self.checks]
        except Exception:
            traceback.print_exc()
            return [missing(name, "-", f"row {self.row} failed") for name in self.checks]
        given = {check.name: check for check in outcome.checks}
        unexpected = [name for name in given if name not in self.checks]
        return [
            _line(given[name]) if name in given else missing(name, "-")
            for name in (*self.checks, *unexpected)
        ]


@dataclass(frozen=True)
class Proved:
    """A program that shows something and says so by its exit code, and how much by its output."""

    name: str
    goal: str
    command: Sequence[str]
    figure: Callable[[str], str | None]
    """Reads the figure out of the output; none: nothing was shown."""
    needs: Sequence[str] = ()
    """Patterns of files, each of which must be there."""
    full: Sequence[str] | None = None
    """The command of the complete run, where it is another."""
    seconds: float = 280.0
    alone: bool = False
    """It measures: nothing else runs beside it."""
    heavy: bool = False
    """It starts a cluster: one at a time of those."""
    shows: Sequence[Proved] = ()
    """What its short form shows as well; each has a complete run of its own."""

    def lines(self, full: bool) -> list[Line]:
        for pattern in self.needs:
            if not any(ROOT.glob(pattern)):
                return [missing(proof.name, proof.goal) for proof in (self, *self.shows)]
        with _CLUSTER if self.heavy else contextlib.nullcontext():
            lines = self._run(full)
        for proof in self.shows if full else ():
            lines += proof.lines(full)
        return lines

    def _run(self, full: bool) -> list[Line]:
        proofs = [self] if full else [self, *self.shows]
        command = self.full if full and self.full is not None else self.command
        files = [path for part in command for path in _expand(part)]
        started = time.monotonic()
        done = _finished([sys.executable, *files], None if full else self.seconds)
        if done is None:
            return [missing(proof.name, proof.goal, f"not done in {self.seconds:g} s") for proof in proofs]
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
        seconds = time.monotonic() - started
        return [proof.shown(done, seconds) for proof in proofs]

    def shown(self, done: subprocess.CompletedProcess[str], seconds: float) -> Line:
        figure = self.figure(done.stdout)
        if figure is None:
            return missing(self.name, self.goal, f"shows nothing (exit {done.returncode})")
        return Line(self.name, f"{figure}, {seconds:.0f} s", self.goal, ok=done.returncode == 0)


Part = Measured | Proved


def _finished(command: list[str], seconds: float | None) -> subprocess.CompletedProcess[str] | None:
    """What a program printed; none if it took too long. It is interrupted then, so that it leaves nothing."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def tests_passed(output: str) -> str | None:
    """What pytest's last line says, if any test passed and none was skipped unseen."""
    last = output.strip().rsplit("\n", 1)[-1]
    counts = {kind: int(number) for number, kind in _PYTEST_COUNTS.findall(last)}
    if not counts.get("passed") and not counts.get("failed"):
        return None
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def line_with(pattern: str) -> Callable[[str], str | None]:
    """The part of the output that matches; its groups, if it has some, joined."""
    compiled = re.compile(pattern)

    def find(output: str) -> str | None:
        found = compiled.search(output)
        if found is None:
            return None
        return " ".join(found.groups()) if found.groups() else found[0]

    return find


def _line(check: Check) -> Line:
    return Line(check.name, check.figure_text, check.goal_text, check.ok)


def _expand(part: str) -> list[str]:
    """A pattern under tests/ becomes the files that match it."""
    if not part.startswith("tests/") or "*" not in part:
        return [part]
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(part))
