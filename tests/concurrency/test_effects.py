"""Promise: every committed event has one effect, whatever happens to the transactions that settle it.

Handlers commit their effects with the settling call; a checker that shares no code with the product counts
them. `make score-correctness` runs the same programs with larger counts, and judges stalls as well.
"""

from __future__ import annotations

import random

import pytest

from faults.__main__ import EFFECTS
from faults.correctness import cancels, control, two_phase
from faults.correctness.programs import PROGRAMS
from faults.correctness.run import Result

SEED = random.randrange(1 << 30)


def assert_exact(result: Result) -> None:
    found = result.verdict
    wrong = (found.lost, found.doubled, found.phantom, found.unexplained, found.disordered, result.problems)
    assert result.landed, f"{result} | seed {SEED}"
    assert not any(wrong), f"{result} | seed {SEED}"


def test_the_checker_reports_consumers_that_cheat(dsn: str) -> None:
    result = control.run(dsn, events=60, seed=SEED)
    assert result.holds, str(result)
    assert result.verdict.lost
    assert result.verdict.doubled


@pytest.mark.slow
def test_effects_are_exact_when_statements_are_cancelled_and_sessions_terminated(dsn: str) -> None:
    assert_exact(cancels.run(dsn, kills=40, workers=4, seed=SEED))


@pytest.mark.slow
def test_effects_are_exact_with_two_phase_commit(dsn: str) -> None:
    assert_exact(two_phase.run(dsn, seconds=2, publishers=4, workers=4, seed=SEED))


def test_the_command_offers_every_program() -> None:
    assert set(EFFECTS) == set(PROGRAMS)
