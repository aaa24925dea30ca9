"""psql's \\copy by several processes at once: what the server does for a client that does next to nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def copy(dsn: str, commands: Sequence[str]) -> None:
    r"""Runs each `\copy` in a psql of its own, all at once."""
    running = [
        subprocess.Popen(
            ["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    errors = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(b"\n".join(errors).decode())
