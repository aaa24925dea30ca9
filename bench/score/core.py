"""What the core must show: cost against bare PostgreSQL and PGMQ, and that nothing is lost."""

from __future__ import annotations

import re

from bench.rows import ROWS, pinned_mixed, receive_one
from bench.score.part import Measured, Part, Proved, line_with, tests_passed

_CHECKS = {
    "publish": ["publish vs bare", "publish vs PGMQ"],
    "publish-one": ["publish(1), SQL, vs plain insert", "publish(1), Python, vs plain insert"],
    "copy": ["COPY vs bare"],
    "consume": ["consume vs bare", "consume vs PGMQ"],
    "consume-20": ["consume, batches of 20, vs bare", "consume, batches of 20, vs PGMQ"],
    "receive-one": receive_one.CHECKS,
    "steady": ["steady vs bare", "steady vs PGMQ"],
    "latency": [
        "latency p50 vs bare",
        "latency p99 vs bare",
        "latency p50 vs PGMQ",
        "latency p99 vs PGMQ",
    ],
    "pinned-xmin": ["pinned xmin, cost last/first", "pinned xmin, throughput last/first"],
    "pinned-mixed": pinned_mixed.CHECKS,
    "backlog": ["backlog, claim cost vs empty", "backlog, buffers vs empty"],
    "isolation": ["isolation, cost vs alone"],
    "fan-out": ["fan-out, publish cost vs no queue", "fan-out, each queue vs a lone one"],
}


def proved_by_tests(
    name: str, *patterns: str, pg: int = 18, goal: str = "all pass", full: str | None = None
) -> Proved:
    """`full`: a pattern of all that the complete run takes, where it is more."""
    command = ["-m", "pytest", "--pg", str(pg), "-q", "-p", "no:cacheprovider"]
    complete = None if full is None else [*command, full]
    return Proved(name, goal, [*command, *patterns], tests_passed, needs=patterns, full=complete)


def _deliveries(output: str) -> str | None:
    """Out of what a fault program says of each reader: how many events, and the sums of what went wrong."""
    judged = output.split("| control", maxsplit=1)[0]
    committed = re.search(r"(\d+) committed", judged)
    if committed is None:
        return None
    lost, phantom, repeated = (
        sum(map(int, re.findall(rf"(\d+) {what}", judged))) for what in ("missed", "phantom", "repeated")
    )
    return f"{committed[1]} events, {lost} lost, {phantom} phantom, {repeated} repeated"


_FAULTS = ["faults/__main__.py"]

CORE: list[Part] = [
    *(Measured(row, checks, ROWS[row]) for row, checks in _CHECKS.items()),
    proved_by_tests("peers' defects, PostgreSQL 15", "tests/contract/test_peer_defects*.py", pg=15),
    proved_by_tests("peers' defects, PostgreSQL 18", "tests/contract/test_peer_defects*.py"),
    Proved(
        "late commits",
        "0 lost",
        ["-m", "faults", "late-commits", "--writers", "30", "--events", "30000", "--delay", "1"],
        _deliveries,
        needs=[*_FAULTS, "faults/log/late_commits.py"],
        full=["-m", "faults", "late-commits"],
    ),
    Proved(
        "rotation under load, longest wait",
        "<= 100 ms",
        ["-m", "faults", "rotation", "--rounds", "1", "--stopped-for", "3"],
        line_with(r"longest lock wait of a publisher: ([^|(]*[^|( ])"),
        needs=[*_FAULTS, "faults/log/rotation.py"],
        full=["-m", "faults", "rotation"],
    ),
    Proved(
        "model of a queue (hypothesis)",
        "holds",
        ["-m", "faults", "model", "--examples", "100", "--steps", "30"],
        line_with(r"model holds: (\d+ examples), (\d+ steps)"),
        needs=[*_FAULTS, "faults/queue/machine.py"],
        full=["-m", "faults", "model"],
    ),
    proved_by_tests("stepped sessions", "tests/concurrency/test_stepped_*.py"),
    proved_by_tests("EXPLAIN guards, PostgreSQL 15", "tests/unit/test_explain*.py", pg=15),
    proved_by_tests("EXPLAIN guards, PostgreSQL 18", "tests/unit/test_explain*.py"),
    proved_by_tests("fresh = upgraded, 20 installs at once", "tests/migration/test_*.py"),
]
