"""Shortened leases: extend to less, release and retry in transactions that stay open beside the sweep."""

from __future__ import annotations

import random
import time
from functools import partial

from faults.correctness.consumer import Consumer
from faults.correctness.run import QUEUE, Result, Run

_LEASE = 600.0
"""Longer than the run: a lease that the sweep missed is not swept by its first expiry either."""


def run(dsn: str, *, events: int, workers: int, seed: int, ordered: bool = False) -> Result:
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'" + (", ordered => true" if ordered else ""))
    run.publish(2, events, size=5, pause=0.02)
    for number in range(workers):
        run.start(f"worker {number}", partial(_work, run, f"worker {number}"))
    run.end()
    return run.result("shortened leases")


def _work(run: Run, name: str, chance: random.Random) -> None:
    with Consumer(run.dsn, QUEUE, name, run.history, _LEASE) as consumer:
        while not run.drained.is_set():
            held = consumer.receive(chance.choice((1, 4)))
            if held is None:
                time.sleep(0.005)
                continue
            way = chance.choice(("shorten", "shorten", "release", "retry", "ack"))
            open_for = chance.uniform(0.0, 0.25)
            if way == "ack" or (run.stop.is_set() and chance.random() < 0.7):
                consumer.ack(held)
            elif way == "shorten":
                # Abandoned from here on: it must be delivered again after it expired.
                consumer.extend(held, chance.choice((0.0, 0.01, 0.1)), open_for=open_for)
            else:
                consumer.give_back(way, held, open_for=open_for)
