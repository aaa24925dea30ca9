"""Limits of a queue under several processes: so many events a second, never more in flight than allowed."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psycopg

from faults.worker.workers import Journal
from harness.states import leased_events

RATE = 100
IN_FLIGHT = 7
SETTLING_IN = 2.0
"""Seconds until all processes are at work and what had gathered is gone."""


@dataclass(frozen=True, slots=True)
class Result:
    processes: int
    measured: float
    rate: float
    in_flight: int
    """The most that the processes themselves held at once."""
    sampled: int
    """The most that the database said was leased at once."""
    handled: int
    seconds: float

    @property
    def holds(self) -> bool:
        return 0.95 * RATE <= self.rate <= 1.05 * RATE and 0 < self.in_flight <= IN_FLIGHT >= self.sampled > 0

    def __str__(self) -> str:
        return (
            f"limits {'hold' if self.holds else 'VIOLATED'}: {self.rate:.1f} a second "
            f"over {self.measured:.0f} s with rps={RATE} and {self.processes} processes | "
            f"at most {self.in_flight} in flight of {self.handled} handled "
            f"with max_in_flight={IN_FLIGHT}, {self.sampled} as sampled | {self.seconds:.1f} s"
        )


def consume(dsn: str, queue: str, journal: Path, stop: Path, longest: float) -> None:
    """Receives what it can get, holds it for a moment, acks it; writes down how many it holds and when."""
    notes = Journal(journal)
    chance = random.Random(journal.name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.exists():
            rows = connection.execute("select lease from pgmb.receive(%s, 50)", [queue]).fetchall()
            if not rows:
                time.sleep(0.004)
                continue
            notes.write("got", time.monotonic(), len(rows))
            time.sleep(chance.random() * longest)
            notes.write("done", time.monotonic(), -len(rows))
            connection.execute("select pgmb.ack(%s)", [rows[0][0]])
    notes.close()


class Crew:
    """Processes that consume one queue until told to stop."""

    def __init__(self, dsn: str, queue: str, folder: Path, processes: int, longest: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults.queue.limits"])
        self._stop = folder / f"stop {queue}"
        self._journals = [folder / f"{queue} {number}" for number in range(processes)]
        self._processes: list[ForkServerProcess] = []
        for journal in self._journals:
            journal.touch()
            process = context.Process(
                target=consume, args=(dsn, queue, journal, self._stop, longest), daemon=True
            )
            process.start()
            self._processes.append(process)

    def end(self) -> None:
        self._stop.touch()
        for process in self._processes:
            process.join(30)
            if process.exitcode != 0:
                raise RuntimeError(f"a consumer ended with {process.exitcode}")

    def abandon(self) -> None:
        for process in self._processes:
            process.kill()

    def changes(self) -> Iterator[tuple[float, int]]:
        """When how many events were taken, or given back (less than none), in the order of time."""
        found = [(at, number) for path in self._journals for _, at, number in Journal.read(path)]
        yield from sorted(found)


def run(dsn: str, folder: Path, *, processes: int, measured: float) -> Result:
    began = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "select pgmb.create_queue('paced', '{paced}', rps => %s),"
            " pgmb.create_queue('narrow', '{narrow}', max_in_flight => %s)",
            [RATE, IN_FLIGHT],
        )
        _publish(admin, "paced", int(RATE * (measured + SETTLING_IN + 30)))
        rate = _rate(dsn, folder, processes, measured)
        _publish(admin, "narrow", 1500)
        crew = Crew(dsn, "narrow", folder, processes, 0.02)
        try:
            sampled = _sample(admin)
            crew.end()
        finally:
            crew.abandon()
    held = most = handled = 0
    for _, change in crew.changes():
        held += change
        most = max(most, held)
        handled += max(change, 0)
    return Result(processes, measured, rate, most, sampled, handled, time.monotonic() - began)


def _rate(dsn: str, folder: Path, processes: int, measured: float) -> float:
    crew = Crew(dsn, "paced", folder, processes, 0.0)
    try:
        time.sleep(SETTLING_IN + measured + 0.5)
        crew.end()
    finally:
        crew.abandon()
    changes = list(crew.changes())
    since = changes[0][0] + SETTLING_IN
    return sum(number for at, number in changes if number > 0 and since <= at < since + measured) / measured


def _sample(admin: psycopg.Connection[Any]) -> int:
    """Until the queue is empty: the most that was leased, by the claims and what was settled of them."""
    most = 0
    while True:
        leased, ever = leased_events(admin, "narrow")
        row = admin.execute("select count(*) from pgmb.log_main where topic = 'narrow'").fetchone()
        most = max(most, leased)
        if (leased, row) == (0, (ever,)):
            return most
        time.sleep(0.01)


def _publish(admin: psycopg.Connection[Any], topic: str, events: int) -> None:
    admin.execute(
        "insert into pgmb.log_main (topic, payload) select %s, to_json(n) from generate_series(1, %s) n",
        [topic, events],
    )
