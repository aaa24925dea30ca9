"""The Python of Spark's workers in tests: a daemon that forks workers has imported first what they import.

Spark's own daemons import nothing, and end workers that had nothing to do for a minute. Each worker then
imports all for itself, which takes a second of processor time: most of what a small job needs.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import sys
from pathlib import Path

_DAEMON = "pyspark.daemon"
_IMPORTED = (
    "adbc_driver_postgresql.dbapi",
    "pandas",
    "pyspark.worker",
    "pgmb.spark.sink.task",
    "pgmb.spark.sink.writers",
    "pgmb.spark.source.readers",
    "pgmb.spark.source.rows",
)


def executable(directory: Path) -> Path:
    """A program to be Spark's Python, in a directory."""
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {__name__} "$@"\n')
    program.chmod(0o755)
    return program


def main() -> None:
    """`-m MODULE ARGUMENTS`, as Spark calls Python."""
    _, option, module, *arguments = sys.argv
    if option != "-m":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    if module == _DAEMON:
        for name in (*_IMPORTED, *arguments[:1]):
            importlib.import_module(name)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
