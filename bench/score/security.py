"""What security must show: attempts of each attacker, rules over the catalog, random grants, the cost."""

from __future__ import annotations

from bench.rows import ROWS
from bench.rows.before import CHECKS
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with
from tests.adversary.tally import ATTACKERS

SECURITY: list[Part] = [
    *[
        Proved(
            f"attacker: {attacker}",
            "0 got through",
            ["-m", "tests.adversary.tally", attacker],
            line_with(r"(\d+ attempts), (\d+ got through)"),
            needs=["tests/adversary/tally.py"],
        )
        for attacker in ATTACKERS
    ],
    proved_by_tests("catalog rules, and a mutation for each", "tests/contract/test_catalog_rules*.py"),
    Proved(
        "random grants and calls",
        "0 outside the model",
        ["-m", "tests.adversary.fuzz", "50"],
        line_with(r"(\d+ grant sets), (\d+ calls), (\d+ outside the model)"),
        full=["-m", "tests.adversary.fuzz", "1000"],
    ),
    Measured("before", CHECKS, ROWS["before"]),
]
