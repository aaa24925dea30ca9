"""The gate says how long each step and its slowest tests took; the score says when nothing was measured."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from scripts import durations, house

PYTEST_15 = """\
....
============================= slowest 10 durations =============================
9.00s call     tests/a/test_a.py::test_one
0.51s setup    tests/a/test_a.py::test_two[x y]
4 passed in 11.10s
"""
PYTEST_18 = "12.25s teardown tests/b/test_b.py::test_three\n1 passed in 13.00s\n"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "build" / "gate.json"
    monkeypatch.setattr(durations, "REPORT", path)
    monkeypatch.setattr(house, "REPORT", path)
    return path


def finished(monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: int, *failed: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tests on PostgreSQL 15").write_text(PYTEST_15)
    (folder / "tests on PostgreSQL 18").write_text(PYTEST_18)
    monkeypatch.setattr(sys, "argv", ["durations", str(folder), *failed])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"setup=100\ntests on PostgreSQL 15=600\nall={seconds}\n"))
    durations.main()


def test_the_gate_prints_its_steps_and_the_slowest_tests_of_both_majors(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(monkeypatch, tmp_path / "output", 700)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1] for line in lines[:3]] == ["setup", "tests on PostgreSQL 15", "all"]
    assert [line.split(" s  ")[1] for line in lines[4:]] == [
        "tests/b/test_b.py::test_three",
        "tests/a/test_a.py::test_one",
        "tests/a/test_a.py::test_two[x y]",
    ]
    assert json.loads(report.read_text())["steps"]["all"] == 700


def test_the_score_reads_the_last_run(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not house.gate()
    assert not house.slowest()
    assert capsys.readouterr().out == "not measured: run .ci/run\n" * 2
    for seconds, failed, good in ((700, [], True), (901, [], False), (700, ["checks"], False)):
        finished(monkeypatch, tmp_path / "output", seconds, *failed)
        assert house.gate() is good
        assert f"{seconds} s, {'failed: checks' if failed else 'passed'}" in capsys.readouterr().out
    assert house.slowest()
    assert "12 s test_three; 9 s test_one" in capsys.readouterr().out
