"""What a beginner gets wrong, and what the command line says to it: the cause, and what to type."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgmb
from pgmb._core.connecting import conninfo
from pgmb.cli import hints
from tests.cli.conftest import Run
from tests.cli.test_every_command import commands

pytestmark = pytest.mark.once(15)

SQL = Path(pgmb.__file__).parent / "sql"
APP = """
import pgmb

app = pgmb.App()


@app.on("greet")
def greet(name: str) -> None:
    raise ValueError(f"no greeting for {name}")
"""


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"host": "127.0.0.1", "port": "1"}, "No PostgreSQL server listens there"),
        ({"host": "/nowhere"}, "No PostgreSQL server listens there"),
        ({"host": "no-such-host.invalid"}, "No such host"),
        ({"dbname": "missing"}, "createdb missing"),
        ({"user": "missing"}, "createuser missing"),
    ],
)
def test_a_failed_connection_names_its_cause(run: Run, dsn: str, changed: dict[str, str], says: str) -> None:
    for command in (("queues", "list"), ("doctor",), ("spark", "lag")):
        outcome = run(*command, dsn=make_conninfo(dsn, **changed))
        assert outcome.code in (1, 3)
        assert says in outcome.err, (command, outcome.err)


def test_a_password_that_is_wrong_is_said_to_be(run: Run) -> None:
    # The test's server trusts everybody.
    refused = psycopg.OperationalError(
        'connection failed: FATAL:  password authentication failed for user "a"'
    )
    assert "Correct the user and the password" in hints.connection_failure(refused)[1]


def test_a_string_that_is_none_is_explained_without_its_password(run: Run) -> None:
    outcome = run("queues", "list", dsn="postgresql//me:hunter2@host/app")
    assert "not a connection string" in outcome.err
    assert "postgresql://user@host:5432/database" in outcome.err
    assert "hunter2" not in outcome.err


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgres+asyncpg", "postgresql+psycopg2"])
def test_a_url_of_sqlalchemy_is_a_connection_string(scheme: str) -> None:
    given = conninfo_to_dict(conninfo(f"{scheme}://me:a+b@host:5433/app"))
    assert (given["host"], given["port"], given["user"], given["password"]) == ("host", "5433", "me", "a+b")


def test_hints_name_the_command_to_type(run: Run) -> None:
    outcome = run("queues", "show", "nothing")
    assert "Hint: Create it with `pgmb queues create NAME PATTERN`." in outcome.err
    assert run("streams", "show", "nothing").err.endswith("Create it with `pgmb streams create NAME`.\n")
    full = "Consume it, or raise max_length with pgmb.alter_queue(queue, max_length => …)."
    assert hints.in_commands(full) == (
        "Consume it, or raise max_length with `pgmb queues alter NAME --max-length …`."
    )


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(
    run: Run, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('billing'), pgmb.create_endpoint('shop', 'https://shop.example/')")
    db.execute(
        "select pgmb.create_schedule('nightly', '0 3 * * *', 'report.due', '{}', now() + interval '1 day')"
    )
    for words, meant in {
        ("receive", "biling"): "billing",
        ("queues", "show", "Billing"): "billing",
        ("publish", "order.paid", "1", "--stream", "mian"): "main",
        ("schedules", "pause", "nightl"): "nightly",
        ("endpoints", "show", "shops"): "shop",
    }.items():
        outcome = run(*words)
        assert outcome.code == 1
        assert f"Hint: Did you mean '{meant}'?" in outcome.err


def test_the_settings_of_a_queue_are_those_that_people_make(run: Run, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('billing', '{order.*}')")
    shown = run("queues", "show", "billing", "--json").json
    # The key of its advisory lock is nobody's business.
    assert {"lock_key", "numbers", "topics", "regex"}.isdisjoint(shown)
    assert shown["patterns"] == ["order.*"]


def test_every_function_that_a_hint_names_has_its_command() -> None:
    known = {" ".join(words) for words in commands()}
    for command in hints.COMMANDS.values():
        assert re.sub("( [A-Z]+)+$", "", command).removeprefix("pgmb ") in known, command
    written = "\n".join(path.read_text() for path in SQL.rglob("*.sql") if "compat" not in path.parts)
    named = set(re.findall(r"pgmb\.([a-z_]+)", "\n".join(re.findall(r"hint = .*", written))))
    assert named > {"create_queue", "create_stream"}
    groups = {"queue": "queues", "stream": "streams", "endpoint": "endpoints", "schedule": "schedules"}
    for function in named:
        verb, _, what = function.partition("_")
        if f"{groups.get(what)} {verb}" in known:
            assert function in hints.COMMANDS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("publish", "", "1"), "a topic must have 1 to 255 bytes"),
        (("publish", "order.*", "1"), "a topic must have no * and no #"),
        (("publish", "greet", "NaN"), "JSON is malformed"),
        (("work", "hello:app", "--reload", "--metrics-port", "9187"), "exclude each other"),
        (("queues", "create", "q", ""), "invalid pattern: ''"),
        (("queues", "create", "q", "greet", "--max-attempts", "0"), "max_attempts must be at least 1"),
        (("queues", "create", "q", "greet", "--lease-for", "0s"), "lease_for must be more than 0"),
        (
            ("endpoints", "create", "e", "https://e.example/", "--batch", "5000"),
            "batch must be between 1 and",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(run: Run, words: tuple[str, ...], says: str) -> None:
    outcome = run(*words)
    assert outcome.code == 1
    assert says in outcome.err
    assert "constraint" not in outcome.err


def test_every_constraint_says_what_it_demands(db: psycopg.Connection[Any]) -> None:
    """Callers read the names of constraints: an error quotes them."""
    named = [
        name
        for (name,) in db.execute(
            "select conname from pg_constraint where contype = 'c' and connamespace = 'pgmb'::regnamespace"
            " and conname !~ 'only_one' and not (conrelid <> 0 and (select relispartition from pg_class"
            " where oid = conrelid))"
        )
    ]
    assert len(named) > 30
    assert [name for name in named if " must " not in name] == []


def test_uninstalling_what_is_not_there_says_so(run: Run) -> None:
    assert run("uninstall", "--yes").out == "Removed schema pgmb.\n"
    again = run("uninstall", "--yes")
    assert (again.code, again.out) == (0, "Schema pgmb is not installed.\n")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "hello.py").write_text(APP)
    return tmp_path


def working(app: Path, dsn: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pgmb", "work", "hello:app", *options]
    environment = {**os.environ, "PGMB_DSN": dsn}
    return subprocess.Popen(command, cwd=app, env=environment, stderr=subprocess.PIPE, text=True)


def test_several_processes_do_not_retry_an_address_that_never_worked(app: Path, dsn: str) -> None:
    with working(app, make_conninfo(dsn, host="127.0.0.1", port="1"), "--processes", "2") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.count("Error: ") == 1
    assert "No PostgreSQL server listens there" in said


def test_a_failure_is_logged_with_the_id_the_worker_and_the_handlers_own_frames(
    app: Path, dsn: str, run: Run
) -> None:
    with working(app, dsn, "--processes", "2") as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "worker 2: working on hello.greet" in line:
                lines.append(run("publish", "greet", '"you"').out)
            if line.startswith("  ValueError"):
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    published = next(line.strip() for line in lines if re.fullmatch(r"[0-9a-f-]{36}\n", line))
    (failed,) = [number for number, line in enumerate(lines) if "greet failed" in line]
    assert re.search(
        r"pgmb\.app worker [12]: queue hello\.greet: greet failed: ValueError: no greeting", lines[failed]
    )
    assert f"({published}, greet, attempt 1)" in lines[failed]
    frames = [line for line in lines[failed:] if line.startswith("    File ")]
    assert len(frames) == 1
    assert "hello.py" in frames[0]
