"""REPEATABLE READ callers of every function, with snapshots that are old: refused with an error, or exact."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import psycopg

from faults.correctness.consumer import Consumer
from faults.correctness.run import QUEUE, Result, Run, rollback

_LEASE = 0.5
_REFUSALS = ("MB022", "MB029")
_OLDEST_SNAPSHOT = 0.4

CALLS = {
    "publish": "select pgmb.publish('other', '1')",
    "publish_many": "select pgmb.publish_many('other', array['1', '2']::json[])",
    "rotate": "select pgmb.rotate()",
    "maintain": "select pgmb.maintain()",
    "tick": "select pgmb.tick()",
    "position": "select pgmb.position()",
    "position_at": "select pgmb.position_at('main', 'infinity')",
    "newest_tick": "select pgmb.newest_tick()",
    "earliest": "select pgmb.earliest()",
    "between": "select pgmb.between('main', pgmb.earliest(), pgmb.position_at('main', 'infinity'))",
    "receive": f"select pgmb.receive('{QUEUE}-spare', 3)",
    "receive_any": f"select pgmb.receive_any(array['{QUEUE}-spare'], 3)",
    "seek": f"select pgmb.seek('{QUEUE}-spare', pgmb.earliest())",
    "purge": f"select pgmb.purge('{QUEUE}-spare')",
    "pause": f"select pgmb.pause('{QUEUE}-spare')",
    "resume": f"select pgmb.resume('{QUEUE}-spare')",
    "dead_letters": f"select pgmb.dead_letters('{QUEUE}-spare')",
    "redrive": f"select pgmb.redrive('{QUEUE}-spare')",
    "confirm": "select pgmb.confirm('main', 'reader', pgmb.position_at('main', 'infinity'))",
    "forget": "select pgmb.forget('main', 'reader')",
}
"""Functions that other sessions' rows could make wrong, by name. Their queue is another one."""


def run(dsn: str, *, seconds: float, workers: int, seed: int) -> Result:
    """`workers` in REPEATABLE READ and as many in READ COMMITTED, while segments rotate and are dropped."""
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"select pgmb.create_queue('{QUEUE}-spare', array['other'])")
        connection.execute("select pgmb.alter_stream('main', rotate_every => '0.3 s', keep_for => '0.3 s')")
    run.publish(2, 1 << 30, size=3, pause=0.01)
    problems: list[str] = []
    said: dict[str, set[str]] = {name: set() for name in CALLS}
    for number in range(workers):
        run.start(f"plain {number}", partial(_work, run, f"plain {number}", False))
        run.start(f"old {number}", partial(_work, run, f"old {number}", True))
    run.start("caller", partial(_call, run, said, problems))
    run.start("janitor", partial(_maintain, run))
    run.wait(seconds)
    run.stop_publishing()
    run.end()
    refused = sorted(name for name, states in said.items() if "MB029" in states)
    called = [name for name, states in said.items() if states]
    return run.result(
        "REPEATABLE READ",
        f"{len(called)} of {len(CALLS)} functions called, {len(refused)} always refuse",
        landed=len(called) == len(CALLS),
        problems=problems,
    )


def _work(run: Run, name: str, old: bool, chance: random.Random) -> None:
    with Consumer(
        run.dsn, QUEUE, name, run.history, _LEASE, refusals=_REFUSALS, repeatable_read=old
    ) as consumer:
        while not (run.stop if old else run.drained).is_set():
            try:
                with consumer.connection.transaction():
                    if old:
                        _age(consumer.connection, chance)
                    began = time.time()
                    held = consumer.take(20 if run.stop.is_set() else chance.choice((1, 5)))
            except psycopg.Error as error:
                consumer.failed(error, ())
                continue
            if held is None:
                if not old:
                    run.asked(QUEUE, began)
                time.sleep(0.005)
                continue
            consumer.record(held)
            if chance.random() < 0.2 and not run.stop.is_set():
                time.sleep(_LEASE * chance.uniform(0.5, 1.3))
            try:
                with consumer.connection.transaction():
                    if old:
                        _age(consumer.connection, chance)
                    consumer.write_effects(held.lease, held.events)
                    consumer.call_ack(held, None if chance.random() < 0.5 else held.events)
            except psycopg.Error as error:
                consumer.failed(error, held.events)


def _age(connection: psycopg.Connection[Any], chance: random.Random) -> None:
    """Takes the transaction's snapshot and lets it grow old."""
    connection.execute("select 1")
    time.sleep(chance.uniform(0, _OLDEST_SNAPSHOT))


def _call(run: Run, said: dict[str, set[str]], problems: list[str], chance: random.Random) -> None:
    """Calls one function after another with an old snapshot."""
    with psycopg.connect(run.dsn, autocommit=True, application_name="caller") as connection:
        while not run.stop.is_set():
            for name, call in CALLS.items():
                connection.execute("begin isolation level repeatable read")
                try:
                    connection.execute("select 1")
                    time.sleep(chance.uniform(0, 0.05))
                    connection.execute(call)
                    connection.execute("commit")
                    said[name].add("ok")
                except psycopg.Error as error:
                    rollback(connection)
                    said[name].add(error.sqlstate or "")
                    if not (
                        (error.sqlstate or "").startswith("MB0")
                        or error.sqlstate in ("40001", "55P03", "40P01")
                    ):
                        problems.append(f"{name}: {error.sqlstate} {error.diag.message_primary}")
                if run.stop.is_set():
                    return


def _maintain(run: Run, chance: random.Random) -> None:
    with psycopg.connect(run.dsn, autocommit=True, application_name="janitor") as connection:
        while not run.stop.wait(0.1):
            try:
                connection.execute("select pgmb.maintain()")
            except psycopg.errors.LockNotAvailable:
                continue
