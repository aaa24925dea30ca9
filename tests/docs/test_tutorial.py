"""The tutorial, followed to the letter in an empty directory."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import until_true

pytestmark = pytest.mark.once(15)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial" / "ten-minutes.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for found, body in FENCE.findall(PAGE) if found == "sh" for line in body.splitlines()]
    return [line for line in lines if not line.startswith(("pip ", "export "))]


def promised() -> list[str]:
    return [line for found, body in FENCE.findall(PAGE) if found == "text" for line in body.splitlines()]


def test_the_tutorial_does_what_it_says(empty_dsn: str, tmp_path: Path) -> None:
    (program,) = [body for found, body in FENCE.findall(PAGE) if found == "python"]
    shop, printed = tmp_path / "shop.py", tmp_path / "printed.txt"
    shop.write_text(program)
    environment = {**os.environ, "PGMB_DSN": empty_dsn}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}

    def run(command: str) -> str:
        done = subprocess.run(shlex.split(command), **options, capture_output=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def worker(command: str) -> Generator[None]:
        # Port 8080 may be taken on the machine that runs the tests.
        command += " --port 0"
        with printed.open("a") as output:
            process = subprocess.Popen(
                shlex.split(command), **options, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()

    def prints(line: str) -> None:
        until_true(lambda: line in printed.read_text())

    install, work, first, retried, unfit, rejected, listing, again, redrive = commands()
    charged, charged_later, told_unfit, told_rejected, charged_at_last = promised()
    assert "Installed" in run(install)
    with worker(work):
        # Published before the queue exists, an event would not be for it.
        until_true(lambda: "working on billing" in printed.read_text())
        run(first)
        prints(charged)
        run(retried)
        prints("the bank does not answer")
        prints(charged_later)
        run(unfit)
        run(rejected)
        until_true(lambda: "250.0" in (told := run(listing)) and "does not fit" in told)
        assert told_rejected in run(listing)
        assert told_unfit in run(listing)
    shop.write_text(program.replace("LIMIT = 100", "LIMIT = 1000"))
    with worker(again):
        run(redrive)
        prints(charged_at_last)
        assert "does not fit" in run(listing)
