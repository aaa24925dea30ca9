"""The fault programs about counted effects as commands: their options, and one run of each."""

from __future__ import annotations

import argparse

from faults.command import command, option

EFFECTS = (
    *(
        "control",
        "expiry",
        "fair-expiry",
        "supersession",
        "keys",
        "shortened",
        "positions",
        "synchronous-failover",
    ),
    *("asynchronous-failover", "spark-failover", "isolation", "cancels", "fair-cancels", "two-phase", "soak"),
)
"""The programs of `faults.correctness.programs`, which is imported only when it is needed."""


@command(
    "effects",
    "effects committed with their ack are counted under one kind of fault: each event once",
    option("program", choices=EFFECTS),
    option("--full", action="store_true", help="the complete counts"),
)
def effects(arguments: argparse.Namespace) -> bool:
    from faults.correctness import programs

    result = programs.run(arguments.program, major=arguments.pg, seed=arguments.seed, full=arguments.full)
    print(result)
    return result.holds
