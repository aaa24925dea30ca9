"""How every command behaves: errors in a line, exit codes, help, completion, odd names, encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from typer.main import get_command

from pgmb import schema
from pgmb.cli import app, durations, output
from scripts import cli_reference
from tests.cli.conftest import OpenTerminal, Run

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

Done = Callable[..., str]
NOWHERE = "host=127.0.0.1 port=1 dbname=x connect_timeout=2"


def commands() -> Iterator[tuple[str, ...]]:
    def below(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, command in getattr(group, "commands", {}).items():
            yield (*words, name)
            yield from below(command, (*words, name))

    yield from below(get_command(app), ())


def test_every_command_explains_itself(run: Run, dsn: str) -> None:
    found = list(commands())
    assert len(found) > 35
    for words in found:
        outcome = run(*words, "--help")
        assert outcome.code == 0, words
        assert "Usage: pgmb" in outcome.out, words
        assert "<bool>" not in outcome.out, "a flag takes no value"


def test_the_reference_is_made_from_the_commands() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
    assert page.read_text() == cli_reference.render(), "run `make docs`"


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("queues", "list"),
        ("publish", "t", "1"),
        ("top", "--once"),
        ("install",),
        ("tail",),
    ],
    ids=" ".join,
)
def test_no_server_is_one_line_and_a_hint(run: Run, words: tuple[str, ...]) -> None:
    outcome = run(*words, dsn=NOWHERE)
    assert outcome.code == 1
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["Error", "Hint"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("receive", "nope"), 1, "queue 'nope' does not exist"),
        (("tail", "--stream", "nope", "--no-follow"), 1, "stream 'nope' does not exist"),
        (("queues", "create", "q", "a**"), 1, "invalid pattern"),
        (("queues", "create", " q"), 1, "invalid queue name"),
        (("queues", "alter", "nope", "--rps", "1"), 1, "does not exist"),
        (("queues", "alter", "nope"), 1, "nothing to change"),
        (("queues", "pause", "nope"), 1, "does not exist"),
        (("streams", "create", "a/b"), 1, "invalid stream name"),
        (("streams", "show", "nope"), 1, "does not exist"),
        (("dlq", "list", "nope"), 1, "does not exist"),
        (("receive", "q", "--max", "0"), 2, ""),
        (("queues", "create", "q", "--lease-for", "-5s"), 2, ""),
        (("queues", "create", "q", "--when-full", "explode"), 2, ""),
        (("nonsense",), 2, "No such command"),
    ],
)
def test_refusals(run: Run, words: tuple[str, ...], code: int, told: str) -> None:
    outcome = run(*words)
    assert outcome.code == code, outcome.err
    assert told in outcome.err
    assert "Traceback" not in outcome.err


def test_a_setting_that_the_database_refuses_is_one_line(run: Run, done: Done) -> None:
    done("queues", "create", "q")
    outcome = run("queues", "alter", "q", "--max-attempts", "0")
    assert outcome.code == 1
    assert len([line for line in outcome.err.splitlines() if not line.startswith("Hint: ")]) == 1


def test_install_upgrade_version_uninstall(run: Run, done: Done, empty_dsn: str) -> None:
    assert run("upgrade", dsn=empty_dsn).code == 1
    refused = run("status", dsn=empty_dsn)
    assert refused.code == 1
    assert "pgmb install" in refused.err
    assert "Installed" in done("install", dsn=empty_dsn)
    assert "applied again" in done("install", dsn=empty_dsn)
    assert run("version", "--json", dsn=empty_dsn).json["database"] == schema.VERSION
    assert "create schema pgmb" in done("schema", "emit")
    done("uninstall", "--yes", dsn=empty_dsn)
    assert "not installed" in done("version", dsn=empty_dsn)


# -- names and encodings -------------------------------------------------------------------------------------

ODD = ("ünï 漢字 🐘", "a'b\"c\\d", "--dashes", "[bold]red[/bold]", "%s %d {0}", "x" * 100)


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_odd_names_come_back_as_they_were(run: Run, done: Done, name: str) -> None:
    done("queues", "create", "--", name)
    assert [one["queue"] for one in run("queues", "list", "--json").json] == [name]
    assert name in done("queues", "list")
    assert name in done("queues", "show", "--", name)
    done("publish", "--", f"t.{name}", "1")
    assert name in done("tail", "--since", "earliest", "--no-follow")
    done("queues", "drop", "--yes", "--", name)


def test_what_would_move_the_cursor_is_written_out(done: Done) -> None:
    done("publish", "t\x1b[2J", '"\\u001b"')
    printed = done("tail", "--since", "earliest", "--no-follow")
    assert "\x1b" not in printed
    assert "t\\x1b[2J" in printed
    assert output.printable("a\nb\u202ec") == "a\\nb\\u202ec"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgre://u:hush@h/db",
        "host=h password=x hush",
        "host=h password='hush",
        "postgresql://u:hush%zz@h/db",
        "postgresql://u:hush@[::1/db",
        "postgresql://u:hush@127.0.0.1:1/db",
        "postgresql://u:hush@127.0.0.1:1/db?nonsense=1",
        "postgresql://u@127.0.0.1:1/db?password=hush",
    ],
)
def test_an_error_about_a_connection_string_does_not_quote_the_password(run: Run, dsn: str) -> None:
    outcome = run("status", dsn=dsn)
    assert outcome.code == 1
    assert "Error: " in outcome.err
    assert "hush" not in outcome.out + outcome.err


def test_an_ascii_terminal_and_arguments_that_are_no_text(dsn: str, done: Done) -> None:
    done("queues", "create", "ünï")
    env = {**os.environ, "PGMB_DSN": dsn, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    pgmb = [sys.executable, "-m", "pgmb"]
    listed = subprocess.run([*pgmb, "queues", "list"], env=env, capture_output=True, check=True)
    assert b"\\xfcn\\xef" in listed.stdout
    as_json = subprocess.run([*pgmb, "queues", "list", "--json"], env=env, capture_output=True, check=True)
    assert "ünï".encode() in as_json.stdout
    broken = subprocess.run(
        [*pgmb, "queues", "pause", b"\xff"],
        env={**os.environ, "PGMB_DSN": dsn},
        capture_output=True,
        check=False,
    )
    assert broken.returncode == 1
    assert b"Traceback" not in broken.stderr


def test_a_narrow_terminal_and_a_pipe(terminal: OpenTerminal, done: Done) -> None:
    name = "a queue with quite a long name " * 3
    done("queues", "create", name.strip())
    assert name.strip() in done("queues", "list"), "a pipe has no width to fit into"
    with terminal("queues", "list", columns=40) as shown:
        assert shown.finish() == 0
        assert max(map(len, shown.text.splitlines())) <= 40


def test_closed_and_full_streams(dsn: str) -> None:
    for shell, code in (
        ("publish t - <&-", 0),
        ("uninstall <&-", 2),
        ("status >&-", 0),
        ("status > /dev/full", 1),
    ):
        ended = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m pgmb {shell}"],
            env={**os.environ, "PGMB_DSN": dsn},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr


# -- completion ----------------------------------------------------------------------------------------------


def complete(dsn: str, line: str) -> list[str]:
    words = line.split(" ")
    env = {
        **os.environ,
        "PGMB_DSN": dsn,
        "_PGMB_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    program = "import sys; sys.argv = ['pgmb']; from pgmb.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    return ended.stdout.split()


def test_the_shell_completes_commands_and_names(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('billing'), pgmb.create_queue('mail'), pgmb.create_stream('audit')")
    assert "queues" in complete(dsn, "pgmb qu")
    assert complete(dsn, "pgmb queues pause bi") == ["billing"]
    assert complete(dsn, "pgmb streams show a") == ["audit"]
    assert complete(NOWHERE, "pgmb queues pause bi") == [], "silent where there is nothing to ask"


# -- durations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("30s", 30, "30s"),
        ("5m", 300, "5m"),
        ("2h", 7200, "2h"),
        ("7d", 604800, "7d"),
        ("1w", 604800, "7d"),
        ("1h30m", 5400, "1h30m"),
        ("500ms", 0.5, "500ms"),
        ("5.25s", 5.25, "5.2s"),
        ("1.5h", 5400, "1h30m"),
        ("90", 90, "1m30s"),
        ("0", 0, "0s"),
        (" 2 H ", 7200, "2h"),
        ("1d1s", 86401, "1d"),
    ],
)
def test_durations(text: str, seconds: float, shown: str) -> None:
    parsed = durations.parse(text)
    assert parsed == timedelta(seconds=seconds)
    assert durations.show(parsed) == shown


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "5 parsecs", "1h 2", "٣s ago", "1e9d", "99999999999d", "5m!"]
)
def test_no_durations(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        durations.parse(text)
