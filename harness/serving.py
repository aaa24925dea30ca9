"""`pgmb serve` in a process of its own, to be asked, told to end, or killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

import psutil

_URL = re.compile(r"HTTP at ([^\s,]+)")


class Served:
    """A process that serves; where, and what it said first."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self.url = ""
        self._log: list[str] = []
        self._told = threading.Event()
        # Read all the time: a log that nobody reads would stop the process once the pipe is full.
        self._reading = [
            threading.Thread(target=self._read, args=given, daemon=True)
            for given in ((process.stdout, self.said), (process.stderr, self._log))
        ]
        for thread in self._reading:
            thread.start()
        self._told.wait()
        if not self.url:
            raise AssertionError(f"it does not serve: {self.said} {self.ended()}")

    @property
    def processes(self) -> list[psutil.Process]:
        """The process and those below it."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return "".join(self._log)

    def kill(self) -> None:
        """End all its processes at once."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ended(self, seconds: float = 60) -> str:
        """Waits for its end. Gives its log."""
        self.process.wait(seconds)
        for thread in self._reading:
            thread.join(seconds)
        return "".join(self._log)

    def _read(self, lines: TextIO, into: list[str]) -> None:
        for line in lines:
            into.append(line)
            # On stdout, or in the log if that is JSON.
            if not self.url and (found := _URL.search(line)):
                self.url = found[1]
                self._told.set()
        self._told.set()


@contextmanager
def serving(
    dsn: str, *arguments: str, port: int = 0, environment: Mapping[str, str] | None = None
) -> Generator[Served]:
    """`pgmb ARGUMENTS` on a port, any that is free unless told; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "pgmb", *arguments, "--port", str(port)],
        env={**os.environ, **(environment or {}), "PGMB_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        served = None
        try:
            served = Served(process)
            yield served
        finally:
            if served is None:
                process.kill()
            else:
                served.kill()
            process.wait()
        served.ended()
