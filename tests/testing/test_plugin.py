"""The pytest plugin, in runs of pytest of their own, and the how-to's example as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harness.postgres import Server

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "test-your-code.md"


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest in a folder, with the plugin by its name: the checkout may be installed without it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PGMB", "PYTEST"))}
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "pytest_asyncio.plugin",
            "-p",
            "pytest_pgmb",
            *arguments,
        ],
        cwd=folder,
        # Importing the other plugins that are installed here takes longer than most of these runs.
        env={
            **inherited,
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def databases(db: psycopg.Connection[Any]) -> set[str]:
    return {
        name for (name,) in db.execute("select datname from pg_database where datname like 'pgmb\\_test\\_%'")
    }


def test_the_how_tos_example_passes(tmp_path: Path, server: Server, db: psycopg.Connection[Any]) -> None:
    before = databases(db)
    for body in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        name = body.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(body)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npgmb_dsn = {server.dsn()}\nasyncio_default_fixture_loop_scope = function\n"
    )
    done = run(tmp_path, "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    assert databases(db) <= before, "all dropped"


def test_each_test_gets_a_database_of_its_own(tmp_path: Path, server: Server) -> None:
    (tmp_path / "test_own.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_own(pgmb_broker, n):\n"
        "    pgmb_broker.create_queue('q')\n"
        "    pgmb_broker.publish('a', n)\n"
        "    assert [event.payload for event in pgmb_broker.receive('q')] == [n]\n"
        "async def test_async(pgmb_abroker):\n"
        "    await pgmb_abroker.publish('a', 1)\n"
        "    ends = await pgmb_abroker.earliest(), await pgmb_abroker.position()\n"
        "    assert len(await pgmb_abroker.between('main', *ends)) == 1\n"
    )
    for asyncio_mode in ("auto", "strict"):
        source = (tmp_path / "test_own.py").read_text()
        if asyncio_mode == "strict":
            source = source.replace("async def", "@pytest.mark.asyncio\nasync def")
        (tmp_path / "test_own.py").write_text(source)
        done = run(tmp_path, "--asyncio-mode", asyncio_mode, PGMB_TEST_DSN=server.dsn())
        assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("dsn", "said"),
    [(None, "--pgmb-dsn"), ("host=/nonexistent dbname=x", "/nonexistent")],
    ids=["none", "wrong"],
)
def test_without_a_server_it_says_what_to_do(tmp_path: Path, dsn: str | None, said: str) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(pgmb_broker): ...\n")
    done = run(tmp_path, *([] if dsn is None else ["--pgmb-dsn", dsn]))
    assert done.returncode == 1
    assert said in done.stdout
    assert "PGMB_TEST_DSN" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_role_that_may_not_create_databases_is_told_so(
    tmp_path: Path, server: Server, db: psycopg.Connection[Any]
) -> None:
    db.execute("create role plain_tester login")
    try:
        (tmp_path / "test_it.py").write_text("def test_it(pgmb_broker): ...\n")
        done = run(tmp_path, "--pgmb-dsn", f"{server.dsn()} user=plain_tester")
        assert "permission denied to create database" in done.stdout
        assert "may create databases" in done.stdout
    finally:
        db.execute("drop role plain_tester")


def test_tests_that_do_not_use_it_do_not_pay_for_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert not {'pgmb', 'psycopg'} & sys.modules.keys()\n"
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_package_brings_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"pytest_pgmb": "pytest_pgmb"}
    assert "src/pytest_pgmb.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
