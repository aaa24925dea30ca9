"""Ordered keys: events of one key settled by several transactions at once, retried, released and buried."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import psycopg

from faults.correctness.consumer import Consumer, Held, Leased
from faults.correctness.run import QUEUE, Result, Run, rollback
from faults.correctness.verdict import Ended

_LEASE = 2.0


def run(dsn: str, *, events: int, workers: int, seed: int, patience: float = 10.0) -> Result:
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s', ordered => true")
    run.publish(3, events, size=9, pause=0.02, keys=3)
    for number in range(workers):
        run.start(f"worker {number}", partial(_work, run, f"worker {number}"))
    run.end(patience)
    return run.result("ordered keys")


def _work(run: Run, name: str, chance: random.Random) -> None:
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Consumer(run.dsn, QUEUE, name, run.history, _LEASE)) for _ in range(2)
        )
        while not run.drained.is_set():
            held = first.receive(chance.choice((2, 4, 12)))
            if held is None:
                time.sleep(0.01)
                continue
            time.sleep(chance.uniform(0.0, 0.25))
            _settle(first, second, held, chance)


def _settle(first: Consumer, second: Consumer, held: Held, chance: random.Random) -> None:
    cut = len(held.events) // 2
    match chance.choices(("whole", "at once", "retry", "release", "bury", "expire"), (20, 50, 12, 10, 5, 1))[
        0
    ]:
        case "whole":
            first.ack(held)
        case "at once" if cut:
            _at_once(first, second, held, cut)
        case "at once":
            first.ack(held)
        case "retry":
            if not cut or first.ack(held, held.events[:cut]):
                first.give_back("retry", held, after=chance.choice((0.0, 0.1)))
        case "release":
            if not cut or first.ack(held, held.events[:cut]):
                first.give_back("release", held)
        case "bury":
            if not cut or first.ack(held, held.events[:cut]):
                first.give_back("bury", held, held.events[cut:])


def _at_once(first: Consumer, second: Consumer, held: Held, cut: int) -> None:
    """Two transactions settle two parts of a lease; neither sees what the other one did.

    The second waits for no lock of the first, or its `lock_timeout` ends it.
    """
    parts = [(first, held.events[:cut]), (second, held.events[cut:])]
    open_parts: list[tuple[Consumer, Sequence[Leased]]] = []
    try:
        for consumer, events in parts:
            consumer.connection.execute("begin")
            open_parts.append((consumer, events))
            consumer.connection.execute("set local lock_timeout = '500ms'")
            consumer.write_effects(held.lease, events)
            consumer.call_ack(held, events)
    except psycopg.Error as error:
        # The second part waits or failed: settle the parts one after the other, in their order.
        for consumer, _ in open_parts:
            rollback(consumer.connection)
        first.failed(error, held.events if error.sqlstate == "MB011" else ())
        if error.sqlstate != "MB011":
            first.ack(held)
        return
    for consumer, settled in open_parts:
        try:
            consumer.connection.execute("commit")
        except psycopg.Error as error:
            consumer.failed(error, settled)
            continue
        now = time.time()
        for leased in settled:
            leased.delivery.ended, leased.delivery.ended_at = Ended.SETTLED, now
