"""Effects at expiry: leases shorter than the work of some consumers, settled whole, in parts and chained."""

from __future__ import annotations

import random
import time
from functools import partial

from faults.correctness.consumer import Consumer, Held
from faults.correctness.run import QUEUE, Result, Run

_LEASE = 0.4


def run(dsn: str, *, events: int, workers: int, seed: int, options: str = "") -> Result:
    """`workers` threads; half of them sleep around the expiry of every second lease."""
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'{options}")
    run.publish(4, events, size=50, pause=0.01)
    for number in range(workers):
        run.start(f"worker {number}", partial(_work, run, f"worker {number}"))
    run.end()
    refused = run.refused()
    return run.result("effects at expiry", f"{refused} refused as lost", landed=refused > 0)


def _work(run: Run, name: str, chance: random.Random) -> None:
    held: Held | None = None
    with Consumer(run.dsn, QUEUE, name, run.history, _LEASE) as consumer:
        while not run.drained.is_set():
            if held is None:
                held = consumer.receive(chance.choice((1, 3, 7, 20)))
            if held is None:
                time.sleep(0.01)
                continue
            held = _settle(consumer, held, chance)


def _settle(consumer: Consumer, held: Held, chance: random.Random) -> Held | None:
    """Settles a lease in one of several ways. Returns the next lease where the way gives one."""
    if chance.random() < 0.25:
        time.sleep(_LEASE * chance.uniform(0.8, 1.3))
    match chance.choices(
        ("whole", "parts", "chained", "retry", "release", "extend", "abandon", "bury"),
        (40, 15, 15, 10, 5, 8, 4, 1),
    )[0]:
        case "whole":
            consumer.ack(held)
        case "parts":
            _in_parts(consumer, held, chance)
        case "chained":
            return consumer.receive(chance.choice((1, 5)), after=held)
        case "retry":
            half = len(held.events) // 2
            if half:
                consumer.ack(held, held.events[:half])
            consumer.give_back("retry", held, held.events[half:], after=chance.choice((0.0, 0.05)))
        case "release":
            consumer.give_back("release", held)
        case "extend":
            if consumer.extend(held, _LEASE):
                time.sleep(_LEASE * chance.uniform(0.3, 1.3))
                consumer.ack(held)
        case "bury":
            consumer.give_back("bury", held, held.events[:1])
    return None


def _in_parts(consumer: Consumer, held: Held, chance: random.Random) -> None:
    """Acks some events, then the rest, in two transactions."""
    cut = chance.randint(1, len(held.events))
    if consumer.ack(held, held.events[:cut]) and cut < len(held.events):
        if chance.random() < 0.3:
            time.sleep(_LEASE * chance.uniform(0.5, 1.2))
        consumer.ack(held, held.events[cut:])
