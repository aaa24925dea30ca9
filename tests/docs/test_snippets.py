"""Every SQL, Python and console snippet in the README and the docs runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harness.forks import forks
from harness.postgres import binaries
from pgmb import schema

pytestmark = pytest.mark.once(15)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("[eht]*/*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


PROGRAMS = "<!-- Each snippet is a program of its own. -->"
SPARK = "docs/howto/spark.md"
# Run by tests/spark/test_examples.py, in the JVM that is there, and by tests/lake/test_docs.py, with a table.
# Parts of examples/django, which tests/django compares and runs.
DJANGO = "docs/howto/django.md"
ELSEWHERE = (SPARK, DJANGO, "docs/howto/lake.md", "docs/howto/projections.md")


def snippets(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if snippets(page, language)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with forks(tmp_path_factory.mktemp("forks")) as found:
        yield found


@pytest.mark.parametrize("page", pages_with("sql"))
def test_sql_snippets_run_in_psql(page: Path, dsn: str, db: psycopg.Connection[Any]) -> None:
    # Roles belong to the server, which other tests share: the page's own are removed again.
    made = re.findall(r"create role (\w+)", page.read_text())
    script = "\n".join(snippets(page, "sql"))
    if "--compat pgmq" in page.read_text():
        schema.install(dsn, compat=["pgmq"])
    try:
        subprocess.run(
            [binaries(15) / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", "-"],
            input=script,
            text=True,
            check=True,
            capture_output=True,
        )
    finally:
        for role in made:
            db.execute(f"drop owned by {role}")
            db.execute(f"drop role {role}")


def run_each(programs: list[str], dsn: str, path: str) -> None:
    """Each in a process, on the test's database in place of the one called app."""
    server = conninfo_to_dict(dsn)
    environment = {f"PG{name.upper()}": str(server[name]) for name in ("host", "port", "user")}
    for program in programs:
        text = program.replace("///app", f"///{server['dbname']}").replace(
            '"NAME": "app"', f'"NAME": "{server["dbname"]}"'
        )
        done = subprocess.run(
            ["pgmb-python"],
            input=text,
            env={**os.environ, **environment, "PATH": path},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id not in ELSEWHERE])
def test_python_snippets_run(
    page: Path, dsn: str, db: psycopg.Connection[Any], capsys: Any, path: str
) -> None:
    db.execute("create table orders (id int, paid boolean)")
    if PROGRAMS in page.read_text():
        run_each(snippets(page, "python"), dsn, path)
        if page.name == "outbox.md":
            assert db.execute("select count(*) from orders").fetchone() == (9,)
            assert db.execute("select count(*) from pgmb.log_main").fetchone() == (9,)
        return
    first, *rest = snippets(page, "python")
    text = first.replace("postgresql:///app", dsn)
    # Further snippets go on inside the first one's `with`.
    for snippet in rest:
        text += "".join(f"    {line}\n" if line else "\n" for line in snippet.splitlines())
    # As a file: handlers are named for it.
    exec(compile(text, str(page), "exec"), {"__name__": "__main__", "__file__": str(page)})
    if page.name == "README.md":
        assert capsys.readouterr().out == "order.paid 42 1\n"


def shell(script: list[str], dsn: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-e", "-x"],
        input="\n".join(script),
        env={**os.environ, "PATH": path, "PGMB_DSN": dsn},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("page", pages_with("console"))
def test_console_snippets_run_in_a_shell(page: Path, dsn: str, path: str) -> None:
    """The lines that begin with $, but for the one that says where the database is."""
    lines = "".join(snippets(page, "console")).splitlines()
    script = [line[2:] for line in lines if line.startswith("$ ") and not line.startswith("$ export ")]
    done = shell(script, dsn, path)
    assert done.returncode == 0, done.stderr


def test_a_console_snippet_can_fail(dsn: str, path: str) -> None:
    done = shell(["echo 7 | pgmb publish t -", "pgmb queues show nope", "echo further"], dsn, path)
    assert (done.returncode, "further" in done.stdout) == (1, False)
    assert "Error: queue 'nope' does not exist" in done.stderr
    assert shell(["pgmb queues nonsense"], dsn, path).returncode == 2


def test_the_readme_links_to_pages_that_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
