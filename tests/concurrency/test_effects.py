"""Promise: every committed event has one effect, whatever happens to the transactions that settle it.

Handlers commit their effects with the settling call; a checker that shares no code with the product counts
them. `make score-correctness` runs the same programs with larger counts, and judges stalls as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from faults.correctness import (
    cancels,
    control,
    expiry,
    isolation,
    keys,
    positions,
    shortened,
    supersession,
    two_phase,
)
from faults.correctness.commands import EFFECTS
from faults.correctness.programs import PROGRAMS
from faults.correctness.run import Result
from tests.conftest import FreshServer

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
    assert_exact(cancels.run(dsn, kills=25, workers=4, seed=SEED))


@pytest.mark.slow
def test_effects_are_exact_when_leases_expire_while_they_are_settled(dsn: str) -> None:
    assert_exact(expiry.run(dsn, events=300, workers=8, seed=SEED))


@pytest.mark.slow
def test_effects_are_exact_when_transactions_stay_open_after_their_receive(dsn: str) -> None:
    assert_exact(supersession.run(dsn, rounds=2, queues=4, seed=SEED))


@pytest.mark.slow
def test_keys_stay_in_order_when_transactions_settle_parts_of_them_at_once(dsn: str) -> None:
    assert_exact(keys.run(dsn, events=180, workers=5, seed=SEED))


@pytest.mark.slow
def test_leases_shortened_in_open_transactions_are_delivered_again(dsn: str) -> None:
    assert_exact(shortened.run(dsn, events=120, workers=5, seed=SEED))


@pytest.mark.slow
def test_effects_are_exact_beside_callers_in_repeatable_read(dsn: str) -> None:
    assert_exact(isolation.run(dsn, seconds=1.5, workers=2, seed=SEED))


@pytest.mark.slow
def test_effects_are_exact_with_two_phase_commit(dsn: str) -> None:
    assert_exact(two_phase.run(dsn, seconds=1.2, publishers=3, workers=3, seed=SEED))


@pytest.mark.slow
@pytest.mark.crash
def test_positions_taken_before_a_crash_read_what_is_published_after_it(
    fresh_server: FreshServer, install: Callable[[str], None]
) -> None:
    server = fresh_server()
    install(server.dsn())
    assert_exact(positions.run(server, server.dsn(), crashes=1, seed=SEED))


def test_the_command_offers_every_program() -> None:
    assert set(EFFECTS) == set(PROGRAMS)
