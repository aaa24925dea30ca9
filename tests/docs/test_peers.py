"""The programs beside our peers': ours run, none is longer than a peer's, and the page shows the files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psycopg
import pytest

from harness.postgres import binaries
from harness.programs import FOLDER, PEERS, TASKS, Program, run

pytestmark = pytest.mark.once(15)

ROOT = FOLDER.parents[1]
PAGE = FOLDER.parent / "explanation" / "peers.md"


@pytest.mark.parametrize("task", TASKS)
def test_ours_runs_from_an_empty_database(task: str, empty_dsn: str, pg_major: int) -> None:
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("create table orders (id int)")
    path = f"{Path(sys.executable).parent}:{binaries(pg_major)}"
    assert (
        "42" in (shown := run(Program("pgmb", task), empty_dsn, path, {}, timeout=100))
        or shown == "hello world"
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("peer", PEERS)
def test_ours_is_no_longer(task: str, peer: str) -> None:
    assert Program("pgmb", task).lines <= Program(peer, task).lines


@pytest.mark.parametrize("task", TASKS)
def test_the_page_counts_right(task: str) -> None:
    rows = re.findall(r"^\| \w[^|]* \| ([\d |]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows[TASKS.index(task)].split(" | ") == [str(Program(peer, task).lines) for peer in PEERS]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("peer", PEERS)
def test_the_page_shows_the_files(task: str, peer: str) -> None:
    program = Program(peer, task)
    assert f"```py\n{program.code}```\n\n```sh\n{program.commands}```\n" in PAGE.read_text()


def test_the_readme_shows_the_shortest() -> None:
    program = Program("pgmb", "hello")
    assert f"```py\n{program.code}```\n\n```sh\n{program.commands}```\n" in (ROOT / "README.md").read_text()


def test_comments_and_empty_lines_do_not_count() -> None:
    program = Program("pgmb", "hello")
    assert program.lines == 7
    assert program.terminals == [["pgmb work hello:app --install"], ["pgmb publish greet '\"world\"'"]]
