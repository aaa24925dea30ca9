"""What the repository itself must show: one schema version, a documented interface, a short gate."""

from __future__ import annotations

from bench.score.core import proved_by_tests
from bench.score.part import Part, Proved, line_with
from scripts.house import LONGEST_GATE, LONGEST_TEST


def _fact(name: str, goal: str, fact: str) -> Proved:
    return Proved(name, goal, ["-m", "scripts.house", fact], line_with(r".+"), needs=["scripts/house.py"])


HOUSE: list[Part] = [
    _fact("schema versions", "1", "schema-versions"),
    _fact("public functions not documented, internal functions open to others", "0", "boundary"),
    _fact("import circles", "0", "import-circles"),
    proved_by_tests("layers", "tests/unit/test_layers.py"),
    _fact("types of the package and the examples, by pyright", "0 errors", "types"),
    _fact("modules and their median size", "a figure", "module-sizes"),
    _fact("longest SQL functions", "a figure", "longest-functions"),
    _fact("lines of the repository", "a figure", "lines"),
    _fact("gate, last run here", f"< {LONGEST_GATE} s", "gate"),
    _fact("slowest tests of that run", f"< {LONGEST_TEST} s each", "slowest"),
    proved_by_tests("ARCHITECTURE.md against the tree", "tests/unit/test_architecture*.py"),
]
