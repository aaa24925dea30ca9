"""`pgmb serve` in a process of its own, to be asked, told to end, or killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Served:
    """A process that serves; where, and what it said first."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)
            if line.startswith("HTTP at "):
                self.url = line.split()[2].rstrip(",")
                return
        raise AssertionError(f"it does not serve: {self.said}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(dsn: str, *arguments: str, port: int = 0) -> Iterator[Served]:
    """`pgmb ARGUMENTS` on a port, any that is free unless told; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "pgmb", *arguments, "--port", str(port)],
        env={**os.environ, "PGMB_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Served(process)
        finally:
            process.kill()
            process.communicate()
