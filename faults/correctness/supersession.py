"""Supersession: transactions that receive and stay open for over a second, and the consumers that pass them.

In every round of a queue one transaction keeps the queue's lock, a second one waits for it and supersedes it,
and workers arrive at random moments: also between the end of the first and the commit of the second.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import psycopg

from faults.correctness.consumer import Consumer, Held
from faults.correctness.run import Result, Run

_LEASE = 8.0
_WORKERS = 4


def run(dsn: str, *, rounds: int, queues: int, seed: int) -> Result:
    """`rounds` in each of so many queues at once."""
    run = Run(dsn, seed=seed, queues=queues, options=f"lease_for => '{_LEASE} s'", superseding=True)
    run.publish(1, rounds * queues * 20, size=10, pause=0.5)
    rounds_of = {queue: _Rounds(rounds) for queue in run.queues}
    for queue in run.queues:
        for name, work in (("first", _first), ("second", _second)):
            run.start(
                f"{name} of {queue}",
                partial(work, run, queue, name, rounds_of[queue]),
            )
        for number in range(_WORKERS):
            run.start(
                f"worker {number} of {queue}",
                partial(_work, run, queue, f"worker {number}"),
            )
    for each in rounds_of.values():
        while not each.over.is_set():
            run.wait(0.1)
    run.end(patience=_LEASE + 4)
    undone = sum(each.undone for each in rounds_of.values())
    return run.result(
        "supersession",
        f"{undone} transactions undone, {run.refused()} deliveries refused as lost",
        landed=undone + run.refused() > 0,
    )


class _Rounds:
    """Lets the first and the second transaction of a queue begin each round together."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds
        self.undone = 0
        """Transactions that were refused because they stayed open for too long."""
        self.over = threading.Event()
        self._meeting = threading.Barrier(2, action=self._next)
        self.locked = threading.Event()

    def _next(self) -> None:
        self.left -= 1
        self.locked.clear()
        if self.left < 0:
            self.over.set()

    def begin(self) -> bool:
        self._meeting.wait(60)
        return not self.over.is_set()


def _first(run: Run, queue: str, name: str, rounds: _Rounds, chance: random.Random) -> None:
    with Consumer(run.dsn, queue, name, run.histories[queue], _LEASE) as consumer:
        while rounds.begin():
            held = _hold(consumer, chance, rounds, chance.uniform(1.4, 2.2))
            if held is not None:
                consumer.ack(held)


def _second(run: Run, queue: str, name: str, rounds: _Rounds, chance: random.Random) -> None:
    with Consumer(run.dsn, queue, name, run.histories[queue], _LEASE) as consumer:
        while rounds.begin():
            rounds.locked.wait(10)
            held = _hold(consumer, chance, rounds, chance.uniform(0.2, 1.0))
            if held is not None:
                consumer.ack(held)


def _hold(consumer: Consumer, chance: random.Random, rounds: _Rounds, seconds: float) -> Held | None:
    """Receives in a transaction that stays open. Returns the lease if it is still to be settled."""
    way = chance.choice(("commit", "commit", "roll back", "settle"))
    held: Held | None = None
    try:
        with consumer.connection.transaction() as transaction:
            held = consumer.take(chance.choice((1, 5)))
            rounds.locked.set()
            time.sleep(seconds)
            if way == "roll back":
                raise psycopg.Rollback(transaction)
            if way == "settle" and held is not None:
                consumer.write_effects(held.lease, held.events)
                consumer.call_ack(held)
    except psycopg.Error as error:
        consumer.failed(error, ())
        rounds.undone += 1
        return None
    finally:
        rounds.locked.set()
    if held is None or way == "roll back":
        return None
    consumer.record(held, settled=way == "settle")
    return held if way == "commit" else None


def _work(run: Run, queue: str, name: str, chance: random.Random) -> None:
    with Consumer(run.dsn, queue, name, run.histories[queue], _LEASE) as consumer:
        while not run.drained.is_set():
            held = consumer.receive(chance.choice((1, 5)))
            if held is not None:
                time.sleep(chance.choice((0.0, chance.uniform(0, 0.6))))
                consumer.ack(held)
            time.sleep(0.02 if run.stop.is_set() else chance.uniform(0, 1.0))
