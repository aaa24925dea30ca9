"""The control: consumers that cheat. The checker must report what they do, or it proves nothing."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial

from faults.correctness.consumer import Consumer
from faults.correctness.run import QUEUE, Result, Run

_LEASE = 0.2


def run(dsn: str, *, events: int, seed: int) -> Result:
    """Some leases are acked without effects, some effects are committed without an ack."""
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'")
    run.publish(1, events, size=10, pause=0.0)
    run.start("worker", partial(_work, run))
    run.end(patience=1.5)
    found = run.result("control")
    reported = bool(found.verdict.lost and found.verdict.doubled)
    return replace(found, what="control: cheating consumers", landed=reported, reports=True)


def _work(run: Run, _: random.Random) -> None:
    leases = 0
    with Consumer(run.dsn, QUEUE, "worker", run.history, _LEASE) as consumer:
        while not run.drained.is_set():
            held = consumer.receive(5)
            if held is None:
                time.sleep(0.01)
                continue
            leases += 1
            if leases % 4 == 1:
                consumer.call_ack(held)
            # Not what comes again: that would never end.
            elif leases % 4 == 2 and held.events[0].delivery.attempt == 1:
                consumer.write_effects(held.lease, held.events)
            else:
                consumer.ack(held)
