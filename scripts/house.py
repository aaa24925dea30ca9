"""python -m scripts.house FACT: a figure about the repository itself. Exit code 1 if it misses its goal.

The duration of the gate is that of its last run here (scripts.durations); without one it is not measured.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from harness import boundary
from harness.postgres import Server
from pgmb import schema
from scripts.durations import REPORT
from scripts.imports import When, circles, imports, modules

ROOT = Path(__file__).resolve().parents[1]
LONGEST_GATE = 900
LONGEST_TEST = 30


def schema_versions() -> bool:
    migrations = list((ROOT / "src/pgmb/sql").glob("migrations/*.sql"))
    print(f"version {schema.VERSION}, {len(migrations)} migrations")
    return schema.VERSION == 1 and not migrations


def boundary_kept() -> bool:
    with _installed() as db:
        undocumented, open_ = boundary.undocumented(db), boundary.open_internals(db)
    print(f"{len(undocumented)} undocumented, {len(open_)} open")
    return not undocumented and not open_


def longest_functions() -> bool:
    with _installed() as db:
        found = db.execute(
            "select proname, array_length(string_to_array(trim(e'\\n' from prosrc), e'\\n'), 1) as lines"
            " from pg_proc where pronamespace::regnamespace::text in ('pgmb', 'pgmb_internal')"
            " order by lines desc limit 3"
        ).fetchall()
    print(", ".join(f"{name} {count} lines" for name, count in found))
    return True


def types() -> bool:
    checked = subprocess.run(
        [ROOT / ".venv/bin/pyright", "src", "examples"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    print(checked.stdout.strip().rpartition("\n")[2])
    return checked.returncode == 0


def lines() -> bool:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    count = sum(path.read_bytes().count(b"\n") for path in files if path.is_file())
    print(f"{count:,} lines in {len(files):,} files")
    return True


def module_sizes() -> bool:
    sizes = sorted(path.read_bytes().count(b"\n") for path in modules(ROOT / "src/pgmb").values())
    print(f"{len(sizes)} modules, median {median(sizes):.0f} lines, longest {sizes[-1]}")
    return True


def import_circles() -> bool:
    found = imports(ROOT / "src/pgmb")
    executed = circles(found, When.IMPORTED, When.CALLED)
    for_types = [circle for circle in circles(found, *When) if circle not in executed]
    print(f"{len(executed)}, and {len(for_types)} for type checkers only")
    for circle in (*executed, *for_types):
        print(f"  {', '.join(circle)}")
    return not executed


def gate() -> bool:
    report = _report()
    if report is None:
        return False
    steps, failed = dict(report["steps"]), report["failed"]
    whole = steps.pop("all")
    outcome = f"failed: {', '.join(failed)}" if failed else "passed"
    print(f"{whole} s, {outcome} at {report['commit']} ({', '.join(f'{n} {s} s' for n, s in steps.items())})")
    return whole < LONGEST_GATE and not failed


def slowest() -> bool:
    report = _report()
    if report is None:
        return False
    tests: list[list[Any]] = report["slowest"]
    print("; ".join(f"{seconds:.0f} s {test.rpartition('::')[2]}" for seconds, test in tests[:3]))
    return bool(tests) and tests[0][0] < LONGEST_TEST


FACTS: dict[str, Callable[[], bool]] = {
    "schema-versions": schema_versions,
    "boundary": boundary_kept,
    "import-circles": import_circles,
    "types": types,
    "module-sizes": module_sizes,
    "longest-functions": longest_functions,
    "lines": lines,
    "gate": gate,
    "slowest": slowest,
}


@contextlib.contextmanager
def _installed() -> Generator[psycopg.Connection[Any]]:
    """A connection to a new server with pgmb."""
    with Server.start(18, name="house", memory=True) as server:
        schema.install(server.dsn())
        with server.connect() as db:
            yield db


def _report() -> dict[str, Any] | None:
    if REPORT.exists():
        found: dict[str, Any] = json.loads(REPORT.read_text())
        return found
    print("not measured: run .ci/run")
    return None


if __name__ == "__main__":
    sys.exit(0 if FACTS[sys.argv[1]]() else 1)
