"""What the promises must show: effects counted under faults, mutations caught, and what it costs."""

from __future__ import annotations

from bench.rows import ROWS
from bench.rows.before import CHECKS
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

_VERDICT = line_with(r": (\d+ events, .*?longest stall [\d.]+ s)")
_GOAL = "0, stall < 2 s"


def _effects(name: str, program: str, goal: str = _GOAL, *, heavy: bool = False) -> Proved:
    command = ["-m", "faults", "effects", program]
    return Proved(
        name,
        goal,
        command,
        _VERDICT,
        needs=["faults/__main__.py", "faults/correctness/programs.py"],
        full=[*command, "--full"],
        heavy=heavy,
    )


def _model(name: str, *options: str, examples: int) -> Proved:
    command = ["-m", "faults", "model", *options]
    return Proved(
        name,
        "holds",
        [*command, "--examples", str(examples), "--steps", "30"],
        line_with(r"model holds: (\d+ examples), (\d+ steps)"),
        needs=["faults/queue/machine.py"],
        full=[*command, "--examples", "5000", "--processes", "4"],
    )


CORRECTNESS: list[Part] = [
    Measured("before", CHECKS, ROWS["before"]),
    # The longest first: they run side by side.
    _effects("failover, asynchronous, with Spark", "spark-failover", heavy=True),
    _effects("effects at expiry", "expiry"),
    _effects("supersession storm", "supersession"),
    _effects("ordered keys, settled in parts", "keys"),
    _effects("leases shortened in open transactions", "shortened"),
    _effects("server killed after positions", "positions"),
    _effects("failover, synchronous", "synchronous-failover"),
    _effects("failover, asynchronous", "asynchronous-failover"),
    _effects("REPEATABLE READ callers", "isolation"),
    _effects("cancels and terminations", "cancels"),
    _effects("fair queue: effects at expiry", "fair-expiry"),
    _effects("fair queue: cancels, terminations", "fair-cancels"),
    _effects("two-phase commit, late commits", "two-phase"),
    _effects("soak of all kinds, limits and shares", "soak"),
    _effects("control: cheating consumers", "control", "reported"),
    Proved(
        "a crowd of consumers",
        "0 superseded, CPU at most 1.5 times",
        ["-m", "faults", "crowd", "--kinds", "plain", "--seconds", "3"],
        line_with(r"(\d+ consumers: \d+ superseded, \d+ twice, \d+ errors, CPU [\d.]+ times)"),
        needs=["faults/queue/crowd.py"],
        full=["-m", "faults", "crowd"],
        alone=True,
    ),
    _model("model of a queue", examples=60),
    _model("model of an ordered queue", "--kind", "ordered", examples=25),
    Proved(
        "full queue that drops its oldest",
        "0 of the newest lost",
        ["-m", "faults", "dropping", "--cycles", "80"],
        line_with(r": (\d+ of the newest events lost), .*?in (\d+ cycles)"),
        needs=["faults/queue/dropping.py"],
        full=["-m", "faults", "dropping"],
    ),
    Proved(
        "clock wrong for a while, all goes on",
        "0 missing, 0 stood still",
        ["-m", "faults", "clock"],
        line_with(r"holds: (0 missing, 0 stood still), .*?(all went on within [\d.]+ s)"),
        needs=["faults/log/clock.py"],
        full=["-m", "faults", "clock", "--full"],
        seconds=1500.0,
    ),
    Proved(
        "a burst of large events beside small ones",
        "all delivered, small ones < 5 s, batches < 72 MiB",
        ["-m", "faults", "sizes", "--endpoints", "10", "--endpoint-events", "3", "--queue-events", "3"],
        line_with(r": (\d+ of \d+ delivered), (small ones within [\d.]+ s), (largest batch \d+ MiB)"),
        needs=["faults/log/sizes.py"],
        full=["-m", "faults", "sizes"],
    ),
    Proved(
        "cron beside a walk over the wall clock",
        "0 differ",
        ["-m", "faults", "due-times"],
        line_with(r"(\d+ compared) \| holds: (0 differ)"),
        needs=["faults/log/due_times.py"],
        full=["-m", "faults", "due-times", "--years", "8", "--hours", "20"],
        seconds=900.0,
    ),
    proved_by_tests("leases that expire together", "tests/contract/test_sweeps.py"),
    proved_by_tests("mutations caught", "tests/concurrency/test_mutations*.py"),
]
