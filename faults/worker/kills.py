"""SIGKILL to consumers, to producers, to a backend, to the whole server: what was acknowledged stands."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psycopg

from faults.crew import Crew
from faults.log.history import Outcome, Publisher, Reader, Verdict, judge
from faults.log.readers import Consumer
from faults.worker.workers import consume, publish, publishers_of, reader_of
from harness.postgres import Server
from harness.waiting import until_true

HEALED_WITHIN = 30.0
"""Seconds after the last kill by which all that was published has taken effect."""


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    kills: int
    verdict: Verdict
    effects_missing: int
    effects_repeated: int
    effects_phantom: int
    landed: int
    """How often a kill demonstrably hit work in progress."""
    healed_after: float
    seconds: float

    @property
    def holds(self) -> bool:
        return (
            self.verdict.clean
            and not (self.effects_missing or self.effects_repeated or self.effects_phantom)
            and self.landed > 0
            and self.healed_after <= HEALED_WITHIN
        )

    def __str__(self) -> str:
        return (
            f"{self.what} {'hold' if self.holds else 'VIOLATED'}: {self.kills} kills, "
            f"{self.landed} in the midst of work | {self.verdict} | "
            f"effects: {self.effects_missing} missing, {self.effects_repeated} twice, "
            f"{self.effects_phantom} phantom | healed after {self.healed_after:.1f} s | {self.seconds:.1f} s"
        )


class Fleet:
    """Worker processes, started anew as they are killed."""

    def __init__(self, folder: Path, work: Callable[..., None], dsn: str, *rest: Any) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["faults.worker.workers"])
        self._folder = folder
        self._work = work
        self._dsn = dsn
        self._rest = rest
        self._running: list[ForkServerProcess] = []
        self._journal_of: dict[ForkServerProcess, Path] = {}
        self.stop = folder / f"stop {work.__name__}"
        self.journals: list[Path] = []

    def start(self) -> None:
        number = len(self.journals) + 1
        self.journals.append(self._folder / f"{self._work.__name__} {number}")
        self.journals[-1].touch()
        process = self._context.Process(
            target=self._work,
            args=(self._dsn, number, self.journals[-1], self.stop, *self._rest),
            daemon=True,
        )
        process.start()
        self._running.append(process)
        self._journal_of[process] = self.journals[-1]

    def kill_one(self, chance: random.Random, *, after: bytes | None = None) -> None:
        """Kills one that is at work, if it can be one whose journal ends with a line of that kind."""
        victim = chance.choice(until_true(self._at_work))
        deadline = time.monotonic() + 1
        while after is not None and time.monotonic() < deadline:
            victim = chance.choice(self._at_work())
            lines = self._journal_of[victim].read_bytes().rsplit(b"\n", 2)
            if len(lines) > 1 and lines[-2].startswith(after):
                break
        self._running.remove(victim)
        victim.kill()
        victim.join(10)

    def _at_work(self) -> list[ForkServerProcess]:
        """Those that have written something: on a busy machine a process needs seconds to begin."""
        return [process for process in self._running if self._journal_of[process].stat().st_size]

    def end(self) -> None:
        self.stop.touch()
        for process in self._running:
            process.join(20)
            if process.exitcode != 0:
                raise RuntimeError(f"a worker ended with {process.exitcode}")

    def abandon(self) -> None:
        for process in self._running:
            process.kill()
            process.join(10)


def prepare(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table effect (event bigint not null)")
        connection.execute("select pgmb.create_queue('q', max_attempts => 1000)")


def consumers(dsn: str, folder: Path, *, kills: int, events: int, seed: int) -> Result:
    """Consumers killed between their receive and their ack."""
    prepare(dsn)
    chance = random.Random(seed)
    began = time.monotonic()
    journal = folder / "publisher"
    crew = Crew()
    publishing = crew.start("publisher", lambda: publish(dsn, 999, journal, folder / "stop", events, 0.002))
    fleet = Fleet(folder, consume, dsn)
    try:
        for _ in range(3):
            fleet.start()
        for _ in range(kills):
            time.sleep(0.05 + chance.random() * 0.15)
            fleet.kill_one(chance, after=b'["got"' if chance.random() < 0.7 else None)
            fleet.start()
        killed_at = time.monotonic()
        (folder / "stop").touch()
        crew.join(publishing)
        publishers = publishers_of([journal])
        _wait_for_effects(dsn, publishers)
        healed_after = time.monotonic() - killed_at
        fleet.end()
    finally:
        (folder / "stop").touch()
        fleet.abandon()
    reader = reader_of(fleet.journals)
    landed = sum(not delivery.settled for delivery in reader.deliveries)
    return _result("consumer kills", dsn, kills, publishers, reader, landed, healed_after, began)


def producers(dsn: str, folder: Path, *, kills: int, seed: int) -> Result:
    """Producers killed around their commit."""
    prepare(dsn)
    chance = random.Random(seed)
    began = time.monotonic()
    finished = threading.Event()
    reader = Reader("queue")
    crew = Crew()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_queue('queue', lease_for => '10 minutes')")
    reading = crew.start("consumer", Consumer(dsn, reader, finished, size=100).run)
    fleet = Fleet(folder, publish, dsn)
    try:
        for _ in range(3):
            fleet.start()
        for _ in range(kills):
            time.sleep(0.03 + chance.random() * 0.1)
            fleet.kill_one(chance)
            fleet.start()
        fleet.end()
    finally:
        fleet.abandon()
        # A backend whose client was killed in mid-commit may yet commit.
        killed_at = time.monotonic()
        _wait_until_gone(dsn, "publisher")
        finished.set()
    crew.join(reading)
    publishers = publishers_of(fleet.journals)
    landed = sum(
        transaction.outcome is Outcome.UNKNOWN
        for publisher in publishers
        for transaction in publisher.transactions
    )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into effect select unnest(%s::bigint[])",
            [[delivery.event for delivery in reader.deliveries]],
        )
    return _result(
        "producer kills", dsn, kills, publishers, reader, landed, time.monotonic() - killed_at, began
    )


def crashes(server: Server, dsn: str, folder: Path, *, backends: int, servers: int, seed: int) -> Result:
    """One backend killed, whereupon the server restarts all of them; or the server with all its processes."""
    prepare(dsn)
    chance = random.Random(seed)
    began = time.monotonic()
    stop_publishing, stop_consuming = folder / "stop publish", folder / "stop consume"
    publisher_journals = [folder / f"publisher {number}" for number in range(3)]
    consumer_journals = [folder / f"consumer {number}" for number in range(3)]
    crew = Crew()
    publishing = [
        crew.start(f"publisher {number}", _call(publish, dsn, number, path, stop_publishing))
        for number, path in enumerate(publisher_journals, 1)
    ]
    consuming = [
        crew.start(f"consumer {number}", _call(consume, dsn, number, path, stop_consuming))
        for number, path in enumerate(consumer_journals, 1)
    ]
    try:
        order = ["backend"] * backends + ["server"] * servers
        chance.shuffle(order)
        for kind in order:
            time.sleep(0.3 + chance.random() * 0.5)
            crew.check()
            if kind == "backend":
                _kill_backend(server, dsn, chance, consumer_journals)
            else:
                _wait_for_work(consumer_journals)
                server.kill()
                server.start_again()
        healing_from = time.monotonic()
        time.sleep(0.3)
        stop_publishing.touch()
        crew.join(*publishing)
        publishers = publishers_of(publisher_journals)
        _wait_for_effects(dsn, publishers)
        healed_after = time.monotonic() - healing_from
    finally:
        stop_publishing.touch()
        stop_consuming.touch()
    crew.join(*consuming)
    reader = reader_of(consumer_journals)
    landed = sum(not delivery.settled for delivery in reader.deliveries)
    return _result("crashes", dsn, len(order), publishers, reader, landed, healed_after, began)


def _call(work: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: work(*arguments)


def _wait_for_work(journals: Sequence[Path]) -> None:
    """Until a consumer has received events and not yet acked them."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        written = [path.read_bytes().splitlines() for path in journals if path.exists()]
        if any(lines and lines[-1].startswith(b'["got"') for lines in written):
            return
        time.sleep(0.001)


def _kill_backend(server: Server, dsn: str, chance: random.Random, journals: Sequence[Path]) -> None:
    """And waits until the server takes sessions again."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        pids = [
            pid
            for (pid,) in connection.execute(
                "select pid from pg_stat_activity where application_name in ('publisher', 'consumer')"
            )
        ]
        if not pids:
            raise RuntimeError("there is no backend to kill")
        _wait_for_work(journals)
        os.kill(chance.choice(pids), signal.SIGKILL)
        # This session, too, is ended by the server; then it recovers.
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                connection.execute("select 1")
                time.sleep(0.005)
            except psycopg.OperationalError:
                break
    while time.monotonic() < deadline:
        try:
            psycopg.connect(dsn).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.01)
    raise TimeoutError(f"{server} did not come back")


def _wait_for_effects(dsn: str, publishers: list[Publisher]) -> None:
    """Until all that was committed took effect, and what may have been had its time; or it takes too long."""
    committed = {
        event.name
        for publisher in publishers
        for transaction in publisher.transactions
        if transaction.outcome is Outcome.COMMITTED
        for event in transaction.events
    }
    deadline = time.monotonic() + HEALED_WITHIN
    with psycopg.connect(dsn, autocommit=True) as connection:
        while time.monotonic() < deadline:
            if committed <= {event for (event,) in connection.execute("select event from effect")}:
                break
            time.sleep(0.05)
    time.sleep(1)


def _wait_until_gone(dsn: str, application: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in range(500):
            row = connection.execute(
                "select count(*) from pg_stat_activity where application_name = %s", [application]
            ).fetchone()
            if row == (0,):
                return
            time.sleep(0.02)
    raise TimeoutError(f"a {application} is still there")


def _result(
    what: str,
    dsn: str,
    kills: int,
    publishers: list[Publisher],
    reader: Reader,
    landed: int,
    healed_after: float,
    began: float,
) -> Result:
    verdict = judge(publishers, [reader])
    names: dict[Outcome, set[int]] = {outcome: set() for outcome in Outcome}
    for publisher in publishers:
        for transaction in publisher.transactions:
            names[transaction.outcome].update(event.name for event in transaction.events)
    with psycopg.connect(dsn, autocommit=True) as connection:
        effects = Counter(event for (event,) in connection.execute("select event from effect"))
    return Result(
        what,
        kills,
        verdict,
        effects_missing=len(names[Outcome.COMMITTED] - effects.keys()),
        effects_repeated=sum(count > 1 for count in effects.values()),
        effects_phantom=len(effects.keys() - names[Outcome.COMMITTED] - names[Outcome.UNKNOWN]),
        landed=landed,
        healed_after=healed_after,
        seconds=time.monotonic() - began,
    )
