"""Promise: whatever is done to a queue, it does what a model of it in plain Python does."""

from __future__ import annotations

from collections import Counter

import pytest

from faults.queue import fair_machine, machine, ordered_machine


@pytest.mark.slow
def test_a_queue_does_what_the_model_does(dsn: str) -> None:
    """`make score-core` runs a hundred examples, and with FULL=1 thousands."""
    done: Counter[str] = Counter()
    # Chance decides what the examples do: until they have done enough.
    while done["deliveries"] <= 40 or done["settled"] <= 8:
        done += machine.run(dsn, examples=10, steps=30)


@pytest.mark.slow
def test_an_ordered_queue_does_what_the_model_does(dsn: str) -> None:
    done: Counter[str] = Counter()
    while done["deliveries"] <= 8 or done["settled"] <= 2:
        done += machine.run(dsn, examples=8, steps=20, kind=ordered_machine.OrderedMachine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        (fair_machine.FairMachine, 6),
        (fair_machine.LimitedFairMachine, 4),
        (fair_machine.FilteredFairMachine, 4),
    ],
)
def test_a_fair_queue_does_what_the_model_does(
    dsn: str, kind: type[fair_machine.FairMachine], examples: int
) -> None:
    done: Counter[str] = Counter()
    while done["deliveries"] <= 40 or done["lagging"] <= 2:
        done += machine.run(dsn, examples=examples, steps=20, kind=kind)
