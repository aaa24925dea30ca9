"""What the Python side must show: handlers, ordered queues, limits, schedules, and how it feels."""

from __future__ import annotations

from bench.rows import ROWS
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

_FAULTS = ["faults/__main__.py"]

PYTHON: list[Part] = [
    Measured("handlers", ["handlers vs the bare loop"], ROWS["handlers"]),
    Proved(
        "ordered queue, workers killed",
        "order, >= 0.6x",
        ["-m", "faults", "ordered", "--rounds", "4"],
        line_with(r"(\d+ events), (\d+ lost), \d+ again, (\d+ out of order).*(ratio [\d.]+)"),
        needs=[*_FAULTS, "faults/queue/ordered.py"],
        full=["-m", "faults", "ordered"],
        alone=True,
    ),
    Proved(
        "limits, 4 processes",
        "95-105/s, <= 7",
        ["-m", "faults", "limits", "--seconds", "8"],
        line_with(r"([\d.]+ a second).*?(at most \d+ in flight)"),
        needs=[*_FAULTS, "faults/queue/limits.py"],
        full=["-m", "faults", "limits"],
        alone=True,
    ),
    Proved(
        "poison, hanging handler, os._exit",
        "exact",
        ["-m", "faults", "poison", "--events", "600"],
        line_with(r"poison (?:holds|VIOLATED): (\d+ events).*?(\d+ dead letters)"),
        needs=[*_FAULTS, "faults/worker/poison.py"],
        full=["-m", "faults", "poison"],
    ),
    Proved(
        "cron, 3 processes, 60 due times",
        "60 publishes",
        ["-m", "faults", "cron"],
        line_with(r"(\d+) (publishes)"),
        needs=[*_FAULTS, "faults/log/cron.py"],
    ),
    proved_by_tests("hello-worlds beside the peers'", "tests/docs/test_peers*.py"),
    proved_by_tests(
        "snippets and tutorial, executed", "tests/docs/test_snippets*.py", "tests/docs/test_tutorial*.py"
    ),
    proved_by_tests("events handled apart, by one engine", "tests/app/test_apart*.py"),
    proved_by_tests("recorded sessions", "tests/cli/test_recorded*.py"),
    proved_by_tests("payload types in handlers", "tests/typing/test_handler*.py"),
    proved_by_tests("idle cost, <= 2 queries a second", "tests/app/test_idle*.py"),
    proved_by_tests(
        "ordered, limits, lanes, TTL, lengths",
        "tests/contract/test_ordered*.py",
        "tests/contract/test_limits*.py",
        "tests/contract/test_lanes*.py",
        "tests/contract/test_ttl*.py",
        "tests/contract/test_drop_oldest*.py",
        "tests/contract/test_release*.py",
        "tests/contract/test_isolation_of_suspects*.py",
    ),
]
