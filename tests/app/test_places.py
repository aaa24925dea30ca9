"""The tables of docs/howto/processes.md: each cell against a program that does it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import Connection

from harness.postgres import Server, create_database, drop_database
from harness.waiting import until_true
from tests.app.places import APUBLISHER, ENDS, PLACES, PUBLISHER

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "processes.md"


def tables() -> dict[tuple[str, str], str]:
    """The cells of the page's tables by row and column."""
    cells: dict[tuple[str, str], str] = {}
    columns: list[str] = []
    for line in PAGE.read_text().splitlines():
        words = [word.strip() for word in line.strip("|").split("|")] if line.startswith("|") else []
        if not words:
            columns = []
        elif not columns:
            columns = words
        elif not words[0].startswith("---"):
            cells |= {(words[0], column): word for column, word in zip(columns[1:], words[1:], strict=True)}
    return cells


CELLS = tables()


class Visits:
    """What the programs of all rows observed and left."""

    def __init__(self, server: Server, database: str, directory: Path) -> None:
        self.db: Connection[tuple[Any, ...]] = server.connect(database)
        self._directory = directory
        command = [sys.executable, "-m", "tests.app.places", server.dsn(database), str(directory)]
        subprocess.run(command, cwd=ROOT, timeout=180, check=True)

    def outcome(self, row: str, column: str) -> str:
        program = {**PLACES, **ENDS}[row].__name__
        try:
            return self._outcome(program, column)
        except (AssertionError, OSError, ValueError) as error:
            error.add_note((self._directory / f"{program}.output").read_text())
            raise

    def _outcome(self, program: str, column: str) -> str:
        if column in (PUBLISHER, APUBLISHER):
            topic = f"{program}.{column.strip('`')}"
            published = self.db.execute("select payload from pgmb.log_main where topic = %s", [topic])
            numbers = [number for (number,) in published]
            if not numbers:
                return "lost"
            assert sorted(numbers) == sorted([0, 1, 2] * (len(numbers) // 3))
            return "published"
        if column == "Connections":
            until_true(lambda: not self._connected(program), 20)
            return "closed"
        seen = [json.loads(line) for line in (self._directory / program).read_text().splitlines()]
        (outcome,) = {outcome for place, outcome in seen if place == column}
        return str(outcome)

    def _connected(self, program: str) -> bool:
        name = "select from pg_stat_activity where application_name = %s"
        return bool(self.db.execute(name, [program]).fetchall())


@pytest.fixture(scope="module")
def visits(server: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visits]:
    name = create_database(server, template)
    made = Visits(server, name, tmp_path_factory.mktemp("places"))
    yield made
    made.db.close()
    drop_database(server, name)


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_each_place_does_as_its_table_says(visits: Visits, row: str, column: str) -> None:
    assert visits.outcome(row, column) == CELLS[row, column]


def test_the_tables_have_every_place() -> None:
    assert {row for row, _ in CELLS} == {*PLACES, *ENDS}
    assert len(CELLS) == 5 * len(PLACES) + 3 * len(ENDS)
