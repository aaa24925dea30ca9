"""Running commands: in this process as the entry point does, or in a terminal."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest
import typer.main

from harness.terminal import Terminal
from pgmb import cli

# Typer builds all commands at every call, a tenth of a second; a process calls it once, a test many times.
_commands = functools.cache(typer.main.get_command)
_asked = functools.cache(cli._asked)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.out)


class Run(Protocol):
    """Runs a command to its end; the database is the test's unless told another."""

    def __call__(self, *arguments: str, stdin: bytes | None = None, dsn: str | None = None) -> Outcome: ...


class OpenTerminal(Protocol):
    def __call__(self, *arguments: str, columns: int = 110, **environment: str) -> Terminal: ...


@pytest.fixture
def run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    def runner(*arguments: str, stdin: bytes | None = None, dsn: str | None = None) -> Outcome:
        target = request.getfixturevalue("dsn") if dsn is None else dsn
        monkeypatch.setenv("PGMB_DSN", target)
        monkeypatch.setattr(sys, "argv", ["pgmb", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        monkeypatch.setattr(typer.main, "get_command", _commands)
        monkeypatch.setattr(cli, "_asked", _asked)
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return runner


@pytest.fixture
def done(run: Run) -> Callable[..., str]:
    """Runs a command that must succeed, and gives what it printed."""

    def runner(*arguments: str, **options: Any) -> str:
        outcome = run(*arguments, **options)
        assert outcome.code == 0, outcome.err
        return outcome.out

    return runner


@pytest.fixture
def terminal(dsn: str) -> Iterator[OpenTerminal]:
    """Starts a command in a terminal on the test's database."""
    opened: list[Terminal] = []

    def opener(*arguments: str, columns: int = 110, **environment: str) -> Terminal:
        env = {**os.environ, "PGMB_DSN": dsn, **environment}
        made = Terminal([sys.executable, "-m", "pgmb", *arguments], env=env, columns=columns)
        opened.append(made)
        return made

    yield opener
    for one in opened:
        one.close()
