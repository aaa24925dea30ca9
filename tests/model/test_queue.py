"""Promise: whatever is done to a queue, it does what a model of it in plain Python does."""

from __future__ import annotations

import pytest

from faults import ordered_machine, queue_machine


@pytest.mark.slow
def test_a_queue_does_what_the_model_does(dsn: str) -> None:
    done = queue_machine.run(dsn, examples=60, steps=30)
    assert done["deliveries"] > 300, done
    assert done["settled"] > 50, done


@pytest.mark.slow
def test_an_ordered_queue_does_what_the_model_does(dsn: str) -> None:
    done = queue_machine.run(dsn, examples=25, steps=20, kind=ordered_machine.OrderedMachine)
    assert done["deliveries"] > 20, done
    assert done["settled"] > 5, done
