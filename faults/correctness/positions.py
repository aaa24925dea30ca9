"""Positions taken right before the server is killed: what is published afterwards is read from each, once."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from uuid import UUID

import psycopg

from faults.correctness import application
from faults.correctness.application import Publisher
from faults.correctness.run import Result
from faults.correctness.verdict import Verdict
from faults.crew import Crew
from harness.postgres import Server

_TAKERS = 3
_EVENTS = 40
"""Published after each crash, each in a transaction of its own: as many transaction ids are used again."""


def run(server: Server, dsn: str, *, crashes: int, seed: int) -> Result:
    began = time.monotonic()
    chance = random.Random(seed)
    application.prepare(dsn)
    publisher = Publisher(0, 3, "positions")
    lost: list[UUID] = []
    doubled: list[UUID] = []
    problems: list[str] = []
    events = taken_in_all = 0
    for _ in range(crashes):
        with psycopg.connect(dsn, autocommit=True) as connection:
            publisher.publish(connection, 5)
            # Nothing may flush the positions by accident.
            connection.execute("checkpoint")
        taken = _taken_until_killed(server, dsn, chance.uniform(0.0, 0.1))
        taken_in_all += len(taken)
        server.start_again()
        with psycopg.connect(dsn, autocommit=True) as connection:
            last = publisher.publish(connection, 1).start - 1
            for _ in range(_EVENTS - 1):
                publisher.publish(connection, 1)
            expected = {
                event
                for (event,) in connection.execute("select event from app.ledger where number > %s", [last])
            }
            events += len(expected)
            # The newest positions of each taker are those that a crash can undo.
            for position in taken:
                try:
                    read = [
                        event
                        for (event,) in connection.execute(
                            "select e.id from pgmb.between('main', %s::pgmb.position, pgmb.position('main'),"
                            " max => 1000000) e",
                            [position],
                        )
                    ]
                except psycopg.Error as error:
                    problems.append(f"{position} was refused: {error}")
                    continue
                lost += expected - set(read)
                doubled += [event for event in set(read) if read.count(event) > 1 or event not in expected]
    return Result(
        "positions after a crash",
        Verdict(events, lost, doubled, [], [], [], 0.0),
        taken_in_all >= crashes,
        f"{crashes} crashes, {taken_in_all} positions, {len(problems)} refused",
        time.monotonic() - began,
        problems,
    )


def _taken_until_killed(server: Server, dsn: str, seconds: float) -> list[str]:
    """Positions that sessions were given before the kill: of each session the newest few."""
    taken: dict[int, list[str]] = {number: [] for number in range(_TAKERS)}
    ready = threading.Barrier(_TAKERS + 1)

    def take(number: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            ready.wait(20)
            while True:
                try:
                    # An id that leaves no trace on disk: it is given again after the crash.
                    connection.execute("select pg_current_xact_id()")
                    if not number:
                        connection.execute("select pgmb.tick('main')")
                    call = "pgmb.position('main')" if number else "pgmb.position_at('main', 'infinity')"
                    row = connection.execute(f"select {call}::text").fetchone()
                except psycopg.OperationalError:
                    return
                assert row is not None
                taken[number].append(row[0])

    crew = Crew()
    threads = [crew.start(f"taker {number}", partial(take, number)) for number in range(_TAKERS)]
    ready.wait(20)
    while not all(taken.values()):
        crew.check()
        time.sleep(0.002)
    time.sleep(seconds)
    server.kill()
    crew.join(*threads)
    return [position for each in taken.values() for position in each[-3:]]
