"""What a first hour and a first night on call must show: first steps, requests, what became of an event."""

from __future__ import annotations

from bench.score.core import proved_by_tests
from bench.score.part import Part, Proved, line_with

_REQUESTS = ["-m", "faults", "requests"]
_FAIR = ["-m", "faults", "fair"]

EXPERIENCE: list[Part] = [
    Proved(
        "requests, workers killed",
        "0 wrong, doubled, left",
        [*_REQUESTS, "--requests", "4000"],
        line_with(r": (\d+ requests, \d+ kills, .* left behind)"),
        needs=["faults/worker/requests.py"],
        full=[*_REQUESTS, "--requests", "10000"],
    ),
    Proved(
        "time to the answer",
        "<= 2x the handler's",
        [*_REQUESTS, "--requests", "400", "--spared"],
        line_with(r"p50 (.*x)\)"),
        needs=["faults/worker/requests.py"],
        alone=True,
    ),
    Proved(
        "an event's six fates",
        "0 wrong, cost <= 1.5x",
        ["-m", "faults", "fates"],
        line_with(r"fates \w+: (six fates, .* wrong) \|.*\((.*x)\)"),
        needs=["faults/operations/fates.py"],
    ),
    Proved(
        "fair queue beside a backlog",
        "p99 <= 3x, throughput >= 0.7 of plain",
        [*_FAIR, "--seconds", "15", "--rounds", "2"],
        line_with(r"beside a backlog .*\((.*x); p50.*throughput .*\((.*x)\)"),
        needs=["faults/queue/fair.py"],
        full=_FAIR,
        alone=True,
    ),
    Proved(
        "model of a fair queue",
        "holds",
        ["-m", "faults", "model", "--kind", "fair", "--examples", "60", "--steps", "30"],
        line_with(r"model holds: (\d+ examples), (\d+ steps)"),
        needs=["faults/queue/fair_machine.py"],
        full=["-m", "faults", "model", "--kind", "fair", "--examples", "2000", "--processes", "4"],
    ),
    proved_by_tests("fair queues", "tests/contract/test_fair.py"),
    proved_by_tests("requests and replies", "tests/app/test_requests.py"),
    proved_by_tests("first steps", "tests/cli/test_first_steps.py"),
    proved_by_tests("first mistakes, as printed", "tests/docs/test_mistakes.py"),
]
