"""The page of first mistakes: what it shows is what a terminal shows."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harness.forks import forks
from harness.terminal import Terminal

pytestmark = pytest.mark.once(15)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "mistakes.md"
BLOCK = re.compile(r"^```(py|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 120
PATIENCE = 60.0
SAME = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?( UTC|Z|[+-]\d\d:\d\d)?", "TIME"),
    (r'"seq":\d+', "SEQ"),
    (r"│ seq +│ \d+", "SEQ"),
    (r"server process \d+", "PROCESS"),
    (r"line \d+, in \w+", "LINE"),
    (r'server at "[^"]*"|server on socket "[^"]*"', "SERVER"),
    (r"[─━]+", "-"),
    (r" +", " "),
)
"""What differs from run to run."""


def normal(text: str) -> list[str]:
    for pattern, word in SAME:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().splitlines()]


class Shell:
    """Runs the commands of the page, in one directory."""

    def __init__(self, folder: Path, environment: dict[str, str], places: dict[str, str]) -> None:
        self.folder, self.environment, self.places = folder, environment, places
        self.worker: Terminal | None = None
        self.worked = ""

    def show(self, block: str) -> str:
        """The block as this run shows it."""
        commands = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
        return "".join(self._show(*command.split("\n", 1)) for command in commands)

    def _show(self, command: str, expected: str) -> str:
        if given := re.fullmatch(r"export (\w+)=(.*)", command):
            self.environment[given[1]] = self.real(given[2])
            return f"$ {command}\n"
        if given := re.fullmatch(r"(\w+)=\$\((.*)\)", command):
            asked = ["sh", "-c", self.real(given[2])]
            done = subprocess.run(
                asked, cwd=self.folder, env=self.environment, text=True, capture_output=True, check=True
            )
            self.environment[given[1]] = done.stdout.strip()
            return f"$ {command}\n{done.stderr}"
        if "working on" in expected:
            return f"$ {command}\n{self._work(command, expected)}"
        end = time.monotonic() + PATIENCE
        while True:
            shown = self._run(command)
            # What becomes of an event takes its time.
            settled = normal(shown) == normal(expected) or time.monotonic() > end
            if settled or not command.startswith("pgmb event"):
                return f"$ {command}\n{shown}"

    def _run(self, command: str) -> str:
        with self._terminal("sh", "-c", self.real(command)) as shown:
            shown.finish()
            return self._told(shown.text)

    def _work(self, command: str, expected: str) -> str:
        """Starts a worker. Its block is complete when the section is."""
        self.worker = self._terminal(sys.executable, "-m", *command.split())
        self.worked = expected
        self.worker.wait_for(lambda: "working on" in self.worker.text, PATIENCE)  # type: ignore[union-attr]
        return "WORKED\n"

    def finish(self, shown: str) -> str:
        """Waits for what the worker was to print, and ends it."""
        if self.worker is None:
            return shown
        worker, self.worker = self.worker, None
        lines = len(normal(self.worked))
        with worker:
            try:
                worker.wait_for(lambda: len(normal(worker.text)) >= lines, PATIENCE)
            finally:
                printed = "\n".join(self._told(worker.text).strip().splitlines()[:lines]) + "\n"
            worker.process.send_signal(signal.SIGINT)
            assert worker.finish() == 0
        return shown.replace("WORKED\n", printed)

    def _terminal(self, *command: str) -> Terminal:
        return Terminal(command, env=self.environment, columns=COLUMNS, cwd=self.folder)

    def real(self, command: str) -> str:
        for name, place in self.places.items():
            command = command.replace(name, place)
        return command

    def _told(self, text: str) -> str:
        for name, place in self.places.items():
            text = text.replace(place, name)
        return text.replace(str(self.folder), "/home/me/shop").replace(socket.gethostname(), "laptop")


@pytest.fixture
def shell(dsn: str, empty_dsn: str, db: psycopg.Connection[Any], tmp_path: Path) -> Iterator[Shell]:
    server, empty = conninfo_to_dict(dsn), conninfo_to_dict(empty_dsn)
    (tmp_path / "commands").mkdir()
    (tmp_path / "shop").mkdir()
    db.execute("create role reporter login")
    try:
        with forks(tmp_path / "commands") as path:
            python = tmp_path / "commands" / "python"
            python.write_text('#!/bin/sh\nexec pgmb-python < "$1"\n')
            python.chmod(0o755)
            environment = {f"PG{name.upper()}": str(server[name]) for name in ("host", "port", "user")}
            environment |= {
                "PATH": path,
                "PGMB_DSN": dsn,
                "NO_COLOR": "1",
                "HOME": str(tmp_path),
                "TZ": "UTC",
            }
            yield Shell(
                tmp_path / "shop",
                {**os.environ, **environment},
                {
                    "@/app": f"@/{server['dbname']}",
                    ":///app": f":///{server['dbname']}",
                    ":///empty": f":///{empty['dbname']}",
                },
            )
    finally:
        db.execute("drop role reporter")


def test_the_page_shows_what_a_terminal_shows(shell: Shell, dsn: str, tmp_path: Path) -> None:
    page = PAGE.read_text()
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    actual = ""
    for section in sections:
        shell.environment["PGMB_DSN"] = dsn

        def replay(block: re.Match[str]) -> str:
            if block[1] == "text":
                return f"```text\n{shell.show(block[2])}```"
            (shell.folder / block[2].split("\n", 1)[0].removeprefix("# ")).write_text(shell.real(block[2]))
            return block[0]

        actual += shell.finish(BLOCK.sub(replay, section))
    (tmp_path / "mistakes.md").write_text(actual)
    assert normal(actual) == normal(page), f"see {tmp_path / 'mistakes.md'}"
