"""What may import what: the client needs nothing of the command line, the pure parts nothing of I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pgmb

PACKAGE = Path(pgmb.__file__).parent

CLIENT = {
    "background",
    "batch",
    "concurrency",
    "cron",
    "endpoints",
    "errors",
    "groups",
    "keys",
    "masking",
    "observer",
    "outbox",
    "patterns",
    "place",
    "polling",
    "schema",
    "statements",
    "types",
    "wire",
}

# Each module may import itself and what is named here, of this package.
BELOW: dict[str, set[str]] = {
    "types": set(),
    "masking": set(),
    "errors": {"types"},
    "wire": {"types"},
    "statements": {"wire", "errors", "types"},
    "cron": {"errors"},
    "groups": {"wire", "errors", "statements", "types"},
    # webhooks.secrets seals and signs, imported on demand.
    "endpoints": {"webhooks", "wire", "errors", "statements"},
    "keys": {"statements"},
    "batch": {"wire", "errors", "types", "statements"},
    "outbox": {"errors"},
    "background": {"errors", "types", "wire"},
    "schema": {"errors"},
    "concurrency": set(),
    "observer": {"types"},
    "polling": set(),
    "patterns": {"errors"},
    "place": {"statements", "types"},
    "_async": CLIENT,
    "_sync": CLIENT,
    "testing": {
        "_async",
        "_sync",
        "app",
        "cron",
        "errors",
        "outbox",
        "patterns",
        "schema",
        "statements",
        "types",
        "wire",
    },
    "app": {
        "_async",
        "_sync",
        "cron",
        "errors",
        "observer",
        "outbox",
        "patterns",
        "polling",
        "roles",
        "statements",
        "types",
    },
    "doctor": {"schema"},
    "telemetry": {"_async", "_sync", "app", "observer", "types", "wire"},
    "webhooks": {"_async", "errors", "masking", "types"},
    "server": {"_async", "doctor", "telemetry", "webhooks", *CLIENT},
    "roles": {"_async", "cron", "errors", "server", "types", "webhooks"},
    "spark": {"_sync", *CLIENT},
}

# What the extra for Spark brings, directly and below.
SPARK = {"adbc_driver_manager", "adbc_driver_postgresql", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}


def imports(path: Path) -> set[str]:
    """The parts of pgmb that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module == "pgmb":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("pgmb."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("pgmb.")}
    return found


@pytest.mark.parametrize("part", sorted(BELOW))
def test_parts_import_only_what_lies_below_them(part: str) -> None:
    path = PACKAGE / part
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    for file in files:
        assert imports(file) <= BELOW[part] | {part}, file


@pytest.mark.parametrize("part", ["types", "statements", "batch", "wire"])
def test_pure_parts_run_no_statement(part: str) -> None:
    text = (PACKAGE / part).with_suffix(".py").read_text()
    assert ".execute(" not in text
    assert "async " not in text


def loaded_by(statement: str) -> set[str]:
    """Every module in memory after a statement."""
    script = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def packages(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_the_package_imports_no_command_line() -> None:
    loaded = loaded_by("import pgmb")
    assert not packages(loaded) & {"typer", "click", "rich", "opentelemetry", "prometheus_client"}
    assert not {"pgmb.cli", "pgmb.roles"} & loaded


@pytest.mark.parametrize("module", ["pgmb", "pgmb.cli", "pgmb.roles", "pgmb.testing"])
def test_only_the_spark_part_imports_spark(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not packages(loaded) & SPARK
    assert "pgmb.spark" not in loaded


@pytest.mark.parametrize("module", ["pgmb", "pgmb.cli", "pgmb.roles", "pgmb.testing", "pgmb.webhooks"])
def test_only_webhooks_imports_what_its_extra_brings(module: str) -> None:
    assert not packages(loaded_by(f"import {module}")) & {"aiohttp", "cryptography", "yarl"}


def test_the_synchronous_client_is_what_the_asynchronous_one_gives() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "unasync.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
