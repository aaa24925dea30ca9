"""The scorecard says short, and fails, for whatever misses its goal, breaks or is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.outcome import Check, Outcome
from bench.revision import install
from bench.rows import ROWS
from bench.score import card, registry
from bench.score.__main__ import main
from bench.score.part import Measured, Proved, line_with
from bench.score.part import tests_passed as passed

ROOT = Path(__file__).parents[2]


def row(*checks: Check) -> Measured:
    return Measured("fake", ["speed"], lambda _ground, _form: Outcome("fake", "", checks=list(checks)))


def proof(code: str, **arguments: Any) -> Proved:
    return Proved("proof", "0 lost", ["-c", code], line_with(r"\d+ lost"), **arguments)


def test_a_figure_that_reaches_its_goal_is_ok(capsys):
    assert card.fill([row(Check("speed", 0.91, 0.9))])
    shown = capsys.readouterr().out
    assert "speed" in shown
    assert "0.91x" in shown
    assert "goal >= 0.9x" in shown
    assert shown.splitlines()[0].endswith("ok")


def test_a_figure_that_misses_its_goal_is_short(capsys):
    assert not card.fill([row(Check("speed", 0.91, 0.9)), row(Check("speed", 0.89, 0.9))])
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["ok", "short"]


def test_the_command_fails_when_a_figure_misses_its_goal(monkeypatch, capsys):
    monkeypatch.setattr("bench.score.__main__.AREAS", {"core": [row(Check("speed", 0.5, 0.9))]})
    for area in ("core", "all"):
        monkeypatch.setattr(sys, "argv", ["score", area])
        assert main() == 1
    assert "short" in capsys.readouterr().out
    monkeypatch.setattr("bench.score.__main__.AREAS", {"core": [row(Check("speed", 0.95, 0.9))]})
    assert main() == 0


def test_a_row_that_breaks_or_gives_no_figure_is_short(capsys):
    def breaks(_ground, _form):
        raise RuntimeError("no server")

    assert not card.fill([Measured("fake", ["speed"], breaks)])
    assert not card.fill([row()])
    assert capsys.readouterr().out.count("short: ") == 2


def test_a_row_that_cannot_be_measured_here_says_why(capsys):
    def compares(_ground, _form):
        install("unused", "0123456789abcdef0123456789abcdef01234567")

    assert not card.fill([Measured("fake", ["speed"], compares)])
    assert "is not in this clone" in capsys.readouterr().out


def test_a_figure_that_is_not_a_number_is_short():
    assert not card.fill([row(Check("speed", float("nan"), 0.9))])
    assert not card.fill([row(Check("speed", float("nan"), 0.9, at_least=False))])


@pytest.mark.parametrize(
    ("part", "ok", "says"),
    [
        (proof("print('0 lost')"), True, "0 lost"),
        (proof("print('3 lost'); exit(1)"), False, "3 lost"),
        (proof("print('hello')"), False, "short: shows nothing"),
        (proof("print('0 lost')", needs=["tests/no_such_*.py"]), False, "short: missing"),
        (proof("import time; time.sleep(30)", seconds=0.5), False, "short: not done"),
    ],
)
def test_a_proof_counts_only_with_its_figure_and_its_exit_code(capsys, part, ok, says):
    assert card.fill([part]) is ok
    assert says in capsys.readouterr().out


def test_a_proof_that_takes_too_long_is_interrupted_and_short(capsys, tmp_path):
    left = tmp_path / "left"
    code = f"import time, pathlib\ntry: time.sleep(60)\nfinally: pathlib.Path({str(left)!r}).touch()"
    assert not card.fill([proof(code, seconds=3)])
    assert "not done in 3 s" in capsys.readouterr().out
    assert left.exists()


def test_a_short_run_may_show_two_things_and_complete_ones_each_their_own(capsys):
    other = Proved("other", "1 kept", ["-c", "raise SystemExit(1)"], line_with(r"\d+ kept"))
    both = proof("print('0 lost, 1 kept')", full=["-c", "print('0 lost')"], heavy=True, shows=[other])
    assert card.fill([both])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["proof", "other"]
    assert not card.fill([both], full=True)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["ok", "short"]


def test_an_empty_card_shows_nothing():
    assert not card.fill([])


def test_what_pytest_says_is_read():
    assert passed("....\n12 passed in 3.1s") == "12 passed"
    assert passed("1 failed, 2 passed, 3 skipped in 3.1s") == "1 failed, 2 passed, 3 skipped"
    assert passed("no tests ran in 0.1s") is None
    assert passed("3 skipped in 0.1s") is None


def test_every_row_is_asked_for_by_an_area():
    parts = [part for area in registry.AREAS.values() for part in area]
    assert {part.row for part in parts if isinstance(part, Measured)} == set(ROWS)


def test_an_unknown_area_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "bench.score", "nothing"], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2
