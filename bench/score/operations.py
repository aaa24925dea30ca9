"""What operations must show: figures that are right, and maintenance whose cost does not grow."""

from __future__ import annotations

from bench.score.core import proved_by_tests
from bench.score.part import Part, Proved, line_with

OPERATIONS: list[Part] = [
    Proved(
        "numbers",
        "0 wrong",
        ["-m", "faults", "numbers"],
        line_with(r"(\d+ figures), (\d+ wrong)"),
        needs=["faults/operations/numbers.py"],
        full=["-m", "faults", "numbers", "--rounds", "60"],
    ),
    proved_by_tests("maintenance, cost with rows that are kept", "tests/contract/test_clearing_cost.py"),
]
