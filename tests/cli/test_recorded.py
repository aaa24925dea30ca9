"""The terminal sessions in the docs: the recorded commands still run, and show what they showed in shape."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from pgmb import doctor
from tests.cli.conftest import OpenTerminal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "command-line.md"
RECORDED = dict(
    re.findall(
        r"<!-- recorded: pgmb (.+?) -->\n```text\n\$ pgmb \1\n(.*?)```\n<!-- end -->",
        PAGE.read_text(),
        re.DOTALL,
    )
)
LINE = re.compile(r"^(ok|note|skip|warn|fail) +(\S+(?: \S+)*?)  ", re.MULTILINE)
PROBLEM = re.compile(r"^(?:warn|fail) .*?\n(?=\S)", re.MULTILINE | re.DOTALL)


def headings(frame: str) -> list[list[str]]:
    """The columns of each table, which a wider or narrower content does not change."""
    return [[cell.strip() for cell in line.split("┃")[1:-1]] for line in frame.splitlines() if "┃" in line]


def test_doctor_and_top_are_recorded() -> None:
    assert [command.split()[0] for command in RECORDED] == ["doctor", "top"]


@pytest.mark.parametrize("command", [one for one in RECORDED if one.startswith("doctor")])
def test_doctor_still_names_these_checks(command: str, terminal: OpenTerminal) -> None:
    recorded = RECORDED[command]
    assert list(dict.fromkeys(name for _, name in LINE.findall(recorded))) == [
        one.name for one in doctor.CHECKS
    ]
    assert all("→" in problem for problem in PROBLEM.findall(recorded))
    assert re.search(r"^\d+ fail, \d+ warn, (\d+ note, )?\d+ ok$", recorded, re.MULTILINE)
    with terminal(*command.split()) as shown:
        assert shown.finish() == 1
        names = [name for _, name in LINE.findall(shown.text)]
    assert list(dict.fromkeys(names)) == [one.name for one in doctor.CHECKS]


@pytest.mark.parametrize("command", [one for one in RECORDED if one.startswith("top")])
def test_top_still_has_these_headings(
    command: str, terminal: OpenTerminal, db: psycopg.Connection[object]
) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    with terminal(*command.split()) as shown:
        shown.wait_for(lambda: bool(shown.frames) and "Queues" in shown.frames[-1])
        assert headings(shown.frames[-1]) == headings(RECORDED[command])
        shown.send("q")
        assert shown.finish() == 0
