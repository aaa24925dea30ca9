"""Commands in an installation without extras."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pgmb

# The modules that each extra brings.
EXTRAS = {
    "server": ("httptools", "jinja2", "starlette", "uvicorn", "uvloop"),
    "webhooks": ("aiohttp", "cryptography"),
    "spark": ("pandas", "pyarrow", "pyspark"),
    "lake": ("deltalake", "yaml"),
}

WITHOUT = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sum(EXTRAS.values(), ())!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import pgmb.cli
pgmb.cli.main()
"""


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "webhooks"),
        ("dispatcher", "webhooks"),
        ("http", "server"),
        ("endpoints test x", "webhooks"),
        ("endpoints key", "webhooks"),
        ("lake sql", "lake"),
        ("spark read main", "spark"),
    ],
)
def test_a_command_without_its_extra_names_it(dsn: str, command: str, extra: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *command.split()],
        env={**os.environ, "PGMB_DSN": dsn, "PYTHONPATH": str(Path(pgmb.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)
    assert f"pgmb[{extra}" in done.stderr.replace("\n", ""), done.stderr
