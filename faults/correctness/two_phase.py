"""Two-phase commit: publishers and settling consumers prepare their transactions and decide later."""

from __future__ import annotations

import random
import time
from functools import partial

import psycopg

from faults.correctness.application import Publisher
from faults.correctness.consumer import Consumer, Held
from faults.correctness.run import QUEUE, Result, Run, rollback
from faults.correctness.verdict import Ended

_LEASE = 0.6
_LATEST_COMMIT = 1.2


def run(dsn: str, *, seconds: float, publishers: int, workers: int, seed: int) -> Result:
    """Half of all transactions are prepared; every fifth of those is rolled back."""
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'")
    decided = [0, 0]
    for number in range(publishers):
        publisher = Publisher(number, 3, QUEUE)
        run.publishers.append(publisher)
        run.start(f"publisher {number}", partial(_publish, run, publisher, number, decided))
    for number in range(workers):
        run.start(f"worker {number}", partial(_work, run, f"worker {number}", decided))
    run.wait(seconds)
    run.stop_publishing()
    run.end()
    return run.result(
        "two-phase commit",
        f"{decided[0]} prepared and committed, {decided[1]} prepared and rolled back",
        landed=min(decided) > 0,
    )


def _publish(run: Run, publisher: Publisher, number: int, decided: list[int], chance: random.Random) -> None:
    name = f"publisher-{number}"
    with psycopg.connect(run.dsn, autocommit=True, application_name=name) as connection:
        while not run.published.is_set():
            connection.execute("begin")
            if chance.random() < 0.5:
                connection.execute("select pg_current_xact_id()")
            numbers = publisher.publish(connection, chance.randint(1, 6))
            if chance.random() < 0.5:
                connection.execute(f"prepare transaction '{name}'")
                time.sleep(chance.uniform(0, _LATEST_COMMIT))
                commits = sum(decided) % 5 < 4
                connection.execute(f"{'commit' if commits else 'rollback'} prepared '{name}'")
                decided[0 if commits else 1] += 1
            else:
                time.sleep(chance.choice((0.0, chance.uniform(0, _LATEST_COMMIT))))
                connection.execute("commit")
            publisher.committed(numbers)


def _work(run: Run, name: str, decided: list[int], chance: random.Random) -> None:
    with Consumer(run.dsn, QUEUE, name, run.history, _LEASE) as consumer:
        while not run.drained.is_set():
            held = consumer.receive(chance.choice((1, 5)))
            if held is None:
                time.sleep(0.01)
            elif chance.random() < 0.5:
                consumer.ack(held)
            else:
                _settle_prepared(consumer, held, decided, chance)


def _settle_prepared(consumer: Consumer, held: Held, decided: list[int], chance: random.Random) -> None:
    whole = chance.random() < 0.5
    try:
        consumer.connection.execute("begin")
        consumer.write_effects(held.lease, held.events)
        consumer.call_ack(held, None if whole else held.events)
        consumer.connection.execute(f"prepare transaction '{consumer.name}'")
    except psycopg.Error as error:
        rollback(consumer.connection)
        consumer.failed(error, held.events)
        return
    time.sleep(chance.uniform(0, _LATEST_COMMIT))
    commits = sum(decided) % 5 < 4
    consumer.connection.execute(f"{'commit' if commits else 'rollback'} prepared '{consumer.name}'")
    decided[0 if commits else 1] += 1
    now = time.time()
    for leased in held.events:
        if commits:
            leased.delivery.ended, leased.delivery.ended_at = Ended.SETTLED, now
        else:
            # Until then no consumer could take it over.
            leased.delivery.expires_until = max(leased.delivery.expires_until, now)
