"""The programs in docs/peers: the same tasks by this package and by its peers, counted and run.

Each is a file of code and a file of commands. Of the commands for the first terminal the last is the worker,
which is ended when the program has shown what it should.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from psycopg.conninfo import conninfo_to_dict

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "peers"
TASKS = ("hello", "retry", "transaction")
PEERS = ("pgmb", "procrastinate", "pgqueuer", "pgmq", "celery")

_SHOWN = {"hello": r"hello world", "transaction": r"receipt for order 42"}
# Where the last command shows the dead letter: the error, or what the peer keeps instead of it.
_BURIED = {"procrastinate": r"failed", "pgqueuer": r"\bcharge\b"}
_ERROR = r"card refused for order 42"
# What has to be there before anything is sent: pgmb's queue, Celery's tables.
_READY = {"pgmb": r"working on", "celery": r" ready\."}


class ProgramError(Exception):
    """The program did not show what it should; the output so far is the message."""


class Program(NamedTuple):
    peer: str
    task: str

    @property
    def code(self) -> str:
        return (FOLDER / self.peer / f"{self.task}.py").read_text()

    @property
    def commands(self) -> str:
        return (FOLDER / self.peer / f"{self.task}.sh").read_text()

    @property
    def terminals(self) -> list[list[str]]:
        """The commands for each terminal."""
        parts = re.split(r"^#.*\n", self.commands, flags=re.MULTILINE)
        return [part.strip().splitlines() for part in parts if part.strip()]

    @property
    def lines(self) -> int:
        """Lines of code and commands that are neither empty nor a comment."""
        text = f"{self.code}\n{self.commands}".splitlines()
        return sum(1 for line in text if line.strip() and not line.lstrip().startswith("#"))


def run(program: Program, dsn: str, path: str, environment: Mapping[str, str], timeout: float = 60.0) -> str:
    """Run it in a directory of its own on the database, which has a table orders; what it showed in the end.

    `path` says where to look for its commands first.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgmb-program-"))
        shutil.copy(FOLDER / program.peer / f"{program.task}.py", folder)
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
        variables = {names[key]: str(value) for key, value in conninfo_to_dict(dsn).items() if key in names}
        variables |= {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        terminal = _Terminal(folder, {**os.environ, **variables, **environment}, time.monotonic() + timeout)
        stack.callback(terminal.close)
        (*before, worker), *others = program.terminals
        for command in before:
            terminal.run(command)
        terminal.start(worker)
        if program.peer in _READY:
            terminal.wait_for(_READY[program.peer])
        following = [command for commands in others for command in commands]
        if program.task != "retry":
            for command in following:
                terminal.run(command)
            return terminal.wait_for(_SHOWN[program.task])
        *sending, listing = following
        for command in sending:
            terminal.run(command)
        while not re.search(_BURIED.get(program.peer, _ERROR), shown := terminal.run(listing, check=False)):
            terminal.still_waiting(shown)
        return shown


class _Terminal:
    """Commands in a directory: one that goes on in the background, others beside it."""

    def __init__(self, folder: str, environment: dict[str, str], deadline: float) -> None:
        self.folder = folder
        self.environment = environment
        self.deadline = deadline
        self.output = Path(folder) / "worker.log"
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> None:
        with self.output.open("wb") as log:
            self.worker = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, command: str, *, check: bool = True) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, self.deadline - time.monotonic()),
        )
        if check and done.returncode != 0:
            raise ProgramError(f"{command}\n{done.stdout}{done.stderr}")
        return done.stdout or done.stderr

    def wait_for(self, pattern: str) -> str:
        while not (found := re.search(pattern, self.output.read_text(errors="replace"))):
            self.still_waiting("")
        return found.group()

    def still_waiting(self, last: str) -> None:
        ended = self.worker is not None and self.worker.poll() is not None
        if ended or time.monotonic() > self.deadline:
            raise ProgramError(f"{last}\n{self.output.read_text(errors='replace')}")
        time.sleep(0.1)

    def close(self) -> None:
        if self.worker is None:
            return
        if self.worker.poll() is None:
            self.worker.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.worker.wait(10)
        # Whatever the worker left: it leads a session of its own.
        with suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()
