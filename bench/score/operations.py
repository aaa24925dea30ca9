"""What operations must show: figures that are right, and maintenance whose cost does not grow."""

from __future__ import annotations

from bench.rows import small_traffic
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

OPERATIONS: list[Part] = [
    Proved(
        "numbers",
        "0 wrong",
        ["-m", "faults", "numbers"],
        line_with(r"(\d+ figures), (\d+ wrong)"),
        needs=["faults/operations/numbers.py"],
        full=["-m", "faults", "numbers", "--rounds", "60"],
    ),
    Proved(
        "recovery, every fault and service",
        "each within 5 s",
        ["-m", "faults", "recovery"],
        line_with(r"(\d+ recoveries), (slowest [\d.]+ s)"),
        needs=["faults/operations/recovery.py"],
        full=["-m", "faults", "recovery", "--outages", "20", "150", "330"],
        seconds=900.0,
        alone=True,
    ),
    Proved(
        "pgmb work alone, blocked, killed, stopped",
        "all kept up",
        ["-m", "faults", "upkeep"],
        line_with(r"(\d+ of \d+ segments dropped), .* (\d+ of \d+ due times fired), .*(back .*)"),
        needs=["faults/operations/upkeep.py"],
        full=["-m", "faults", "upkeep", "--full"],
        alone=True,
    ),
    Measured("small-traffic", small_traffic.CHECKS, small_traffic.run),
    Proved(
        "rolling upgrade and rollback under load",
        "0 failed, wait < 500 ms",
        ["-m", "faults", "upgrade"],
        line_with(r"(\d+ calls), (\d+ failed), (\d+ lost), .* (longest wait \d+ ms)"),
        needs=["faults/operations/upgrade.py"],
        full=["-m", "faults", "upgrade", "--seconds", "30"],
        alone=True,
    ),
    Proved(
        "rolling deploy of workers under load",
        "0 lost, 0 dead, 0 stuck",
        ["-m", "faults", "deploy"],
        line_with(r"(\d+ deploys), (\d+ events), (\d+ lost), (\d+ dead), (\d+ stuck)"),
        needs=["faults/operations/deploy.py"],
        full=["-m", "faults", "deploy", "--runs", "20"],
        seconds=900.0,
        alone=True,
    ),
    proved_by_tests("queues converted with what waits in them", "tests/contract/test_convert.py"),
    Proved(
        "a backlog of segments is dropped",
        "all, 0 errors, 0 waits of more than 100 ms",
        ["-m", "faults", "retention", "--segments", "1100"],
        line_with(r"(\d+ of \d+ segments dropped, .*, \d+ errors, \d+ waits of more than 100 ms)"),
        needs=["faults/log/retention.py"],
        full=["-m", "faults", "retention"],
    ),
    proved_by_tests("upgrade, rollback and locks", "tests/migration/test_upgrade.py"),
    proved_by_tests("maintenance, cost with rows that are kept", "tests/contract/test_clearing_cost.py"),
    proved_by_tests("what became of an event, in every state", "tests/contract/test_fate.py"),
]
