"""The schema of an earlier revision of this repository, to be measured beside the present one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def before() -> str:
    """The revision that the cost rows compare with. PGMB_BEFORE names another."""
    return os.environ.get("PGMB_BEFORE", "92a451f")


class NotMeasurableError(Exception):
    """What a row needs is not there. The message says what, and stands in the row's place."""


@contextmanager
def sources(revision: str) -> Generator[Path]:
    """A folder with the package as that revision has it, for PYTHONPATH."""
    with tempfile.TemporaryDirectory(prefix="pgmb-revision-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "src/pgmb"], cwd=_ROOT, capture_output=True, check=False
        )
        if archive.returncode != 0:
            raise NotMeasurableError(
                f"revision {revision} is not in this clone; fetch the whole history, or set PGMB_BEFORE"
            )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder) / "src"


def install(dsn: str, revision: str) -> None:
    """Installs the schema as that revision has it, by that revision's own code."""
    with sources(revision) as package:
        code = "import sys\nfrom pgmb import schema\nschema.install(sys.argv[1])\n"
        done = subprocess.run(
            [sys.executable, "-c", code, dsn],
            cwd=package,
            env={**os.environ, "PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise NotMeasurableError(f"revision {revision} could not be installed: {done.stderr[-300:]}")
