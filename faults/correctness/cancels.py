"""Statements cancelled and sessions terminated at random moments, of publishers and consumers alike."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import psycopg

from faults.correctness.consumer import Consumer, Held
from faults.correctness.run import QUEUE, Result, Run
from faults.correctness.verdict import Ended, History

_LEASE = 0.5
_PATIENCE = 60.0


def run(dsn: str, *, kills: int, workers: int, seed: int, options: str = "") -> Result:
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'{options}")
    # More than the run needs: publishers end with the kills.
    run.publish(3, 1 << 30, size=7, pause=0.01)
    for number in range(workers):
        run.start(f"worker {number}", partial(_work, run, f"worker {number}"))
    done = [0, 0]
    enough = threading.Event()
    run.start("killer", partial(kill, run, enough, done))
    deadline = time.monotonic() + _PATIENCE
    # Most of them hit publishers, or receives that find nothing.
    while sum(done) < kills or not (interrupted(run.history) or time.monotonic() > deadline):
        run.wait(0.1)
    enough.set()
    run.stop_publishing()
    run.end()
    hit = interrupted(run.history)
    return run.result(
        "cancels and terminations",
        f"{done[0]} cancels, {done[1]} terminations, {hit} deliveries interrupted",
        landed=hit > 0,
    )


def interrupted(history: History) -> int:
    """How many deliveries ended with a settling call that was interrupted."""
    return sum(delivery.ended is Ended.UNKNOWN for delivery in list(history.deliveries))


def kill(run: Run, enough: threading.Event, done: list[int], chance: random.Random) -> None:
    """Cancels and terminates publishers and workers until it is enough; `done` counts both."""
    with psycopg.connect(run.dsn, autocommit=True, application_name="killer") as connection:
        while not enough.is_set():
            time.sleep(chance.uniform(0.0, 0.03))
            cancel = chance.random() < 0.8
            function = "pg_cancel_backend" if cancel else "pg_terminate_backend"
            killed = connection.execute(
                f"select {function}(pid) from pg_stat_activity where datname = current_database()"
                " and (application_name like 'worker%%' or application_name = 'publisher')"
                " and (state = 'active' or not %s) order by random() limit 1",
                [cancel],
            ).fetchone()
            if killed is not None and killed[0]:
                done[0 if cancel else 1] += 1


def _work(run: Run, name: str, chance: random.Random) -> None:
    held: Held | None = None
    with Consumer(run.dsn, QUEUE, name, run.history, _LEASE) as consumer:
        while not run.drained.is_set():
            if held is None:
                held = consumer.receive(chance.choice((1, 10, 40)))
            if held is None:
                time.sleep(0.002)
                continue
            match chance.choices(("whole", "parts", "chained", "retry", "extend"), (5, 3, 3, 1, 1))[0]:
                case "whole":
                    consumer.ack(held)
                case "parts":
                    cut = (len(held.events) + 1) // 2
                    if consumer.ack(held, held.events[:cut]) and held.events[cut:]:
                        consumer.ack(held, held.events[cut:])
                case "chained":
                    held = consumer.receive(5, after=held)
                    continue
                case "retry":
                    consumer.give_back("retry", held)
                case "extend":
                    if consumer.extend(held, _LEASE):
                        consumer.ack(held)
            held = None
