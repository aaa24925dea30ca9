"""What may import what: the client needs nothing of the command line, the pure parts nothing of I/O."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pgmb
from scripts.imports import Import, When, circles, imports, modules

PACKAGE = Path(pgmb.__file__).parent

# The modules beside the packages: what users import.
PUBLIC = {"cron", "drivers", "errors", "outbox", "schema", "types"}
CLIENT = {"_core", *PUBLIC}

# Each part may import itself and these others.
BELOW: dict[str, set[str]] = {
    "types": set(),
    "errors": {"types"},
    "cron": {"errors"},
    "drivers": {"errors"},
    "outbox": {"drivers", "errors"},
    "schema": {"_core", "errors"},
    # On demand: a stream without a lake needs none of it.
    "erasure": {"_core", "errors", "lake"},
    # webhooks.secrets seals and signs, imported on demand.
    # lake reads what the log has dropped, imported on demand too.
    "_core": {"errors", "lake", "types", "webhooks"},
    "_async": CLIENT,
    "_sync": CLIENT,
    "testing": {"_async", "_sync", "app", *CLIENT},
    "app": {"_async", "_sync", "services", *CLIENT},
    "django": {"_async", "_sync", "app", "cli", "schema", "testing", "types"},
    "doctor": {"schema"},
    "telemetry": {"_async", "_sync", "_core", "app", "types"},
    "webhooks": {"_async", "_core", "errors", "types"},
    "server": {"_async", "doctor", "telemetry", "webhooks", *CLIENT},
    "services": {"_async", "_core", "cron", "errors", "server", "types", "webhooks"},
    # Each on demand: tasks of Spark read the lake, and tasks of the lake run on Spark.
    "spark": {"_sync", "lake", *CLIENT},
    "lake": {"spark", *CLIENT},
}

# The order inside _core: each module may import these others.
CORE: dict[str, set[str]] = {
    "durations": set(),
    "masking": set(),
    "observer": set(),
    "concurrency": {"loggers"},
    "loggers": set(),
    "logs": {"masking"},
    "connecting": set(),
    "unclosed": {"loggers"},
    "patterns": set(),
    "models": set(),
    "wire": {"models"},
    "chance": set(),
    "lease": set(),
    "statements": {"durations", "lease", "wire"},
    "claiming": {"chance", "lease", "statements", "wire"},
    "batch": {"statements", "wire"},
    "batch_limit": set(),
    "cursor": {"statements"},
    "endpoints": {"statements", "wire"},
    "foreign": {"statements", "wire"},
    "groups": {"statements", "wire"},
    "keys": {"statements"},
    "lake": {"patterns"},
    "pending": {"batch", "chance", "concurrency", "durations", "wire"},
}

# What the extras for Spark and the lake bring, directly and below.
SPARK = {"adbc_driver_manager", "adbc_driver_postgresql", "numpy", "pandas", "py4j", "pyarrow", "pyspark"}
LAKE = {"deltalake", *SPARK}


@cache
def graph() -> list[Import]:
    return imports(PACKAGE)


def part_of(module: str) -> str:
    """The part of pgmb that a module belongs to; "" is the package's own __init__."""
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("part", sorted(BELOW))
def test_parts_import_only_what_lies_below_them(part: str) -> None:
    beyond = [one for one in graph() if part_of(one.importer) == part]
    assert [one for one in beyond if part_of(one.imported) not in BELOW[part] | {part}] == []


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {part_of(module) for module in modules(PACKAGE)}
    assert parts - {"", "__main__", "cli"} == BELOW.keys()


def test_no_modules_import_each_other() -> None:
    assert circles(graph(), When.IMPORTED) == []


def test_no_import_is_inside_a_function_to_avoid_a_circle() -> None:
    assert circles(graph(), When.IMPORTED, When.CALLED) == []


def test_no_modules_need_each_other_for_their_types() -> None:
    assert circles(graph(), When.IMPORTED, When.NEVER) == []


def test_circles_are_found_by_the_kind_of_their_imports(tmp_path: Path) -> None:
    package = tmp_path / "made"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "a": "from made import b\n",
        "b": "def f():\n    from made.a import x\n",
        "c": "if TYPE_CHECKING:\n    from made.d import x\n",
        "d": "import made.c\nimport made.a\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    found = imports(package)
    assert circles(found, When.IMPORTED) == []
    assert circles(found, When.IMPORTED, When.CALLED) == [["made.a", "made.b"]]
    assert circles(found, When.IMPORTED, When.NEVER) == [["made.c", "made.d"]]


@pytest.mark.parametrize(
    "module", ["types", *(f"_core.{name}" for name in CORE if name not in ("concurrency", "connecting"))]
)
def test_pure_modules_run_no_statement(module: str) -> None:
    text = modules(PACKAGE)[f"pgmb.{module}"].read_text()
    assert ".execute(" not in text
    assert "async " not in text


def test_the_core_has_an_order_of_its_own() -> None:
    inside = {module.removeprefix("pgmb._core.") for module in modules(PACKAGE) if "._core." in module}
    assert inside == CORE.keys()
    for one in graph():
        if "._core." in one.importer and "._core." in one.imported:
            importer, imported = (name.removeprefix("pgmb._core.") for name in one[:2])
            assert imported in CORE[importer], one


@cache
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
    assert not {"pgmb.cli", "pgmb.services"} & loaded


@pytest.mark.parametrize("module", ["pgmb", "pgmb.cli", "pgmb.services", "pgmb.testing"])
def test_only_the_spark_part_imports_spark(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not packages(loaded) & LAKE
    assert not {"pgmb.spark", "pgmb.lake"} & loaded


@pytest.mark.parametrize("module", ["pgmb", "pgmb.cli", "pgmb.services", "pgmb.testing", "pgmb.webhooks"])
def test_only_webhooks_imports_what_its_extra_brings(module: str) -> None:
    assert not packages(loaded_by(f"import {module}")) & {"aiohttp", "cryptography", "yarl"}
