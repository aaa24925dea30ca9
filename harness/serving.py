"""`pgmb serve` in a process of its own, to be asked, told to end, or killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager


class Served:
    """A process that serves; where, and what it said first."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._log: list[str] = []
        # Read all the time: a log that nobody reads would stop the process once the pipe is full.
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if line.startswith("HTTP at "):
                self.url = line.split()[2].rstrip(",")
                return
        raise AssertionError(f"it does not serve: {self.said} {self.ended()}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ended(self, seconds: float = 60) -> str:
        """Waits for its end. Gives its log."""
        self.process.wait(seconds)
        self._reading.join(seconds)
        return "".join(self._log)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)


@contextmanager
def serving(dsn: str, *arguments: str, port: int = 0) -> Generator[Served]:
    """`pgmb ARGUMENTS` on a port, any that is free unless told; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "pgmb", *arguments, "--port", str(port)],
        env={**os.environ, "PGMB_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            served = Served(process)
            yield served
        finally:
            process.kill()
            process.wait()
        served.ended()
