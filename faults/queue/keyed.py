"""SIGKILL to producers around their commit; whoever comes after retries under the same key: no duplicates."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from uuid import uuid4

import psycopg

from faults.worker.workers import Journal

STARTED_WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    kills: int
    retries: int
    found: int
    """How many retries found that what they retried had been published, unknown to anybody."""
    acknowledged: int
    missing: int
    repeated: int
    seconds: float

    @property
    def holds(self) -> bool:
        return not (self.missing or self.repeated) and self.retries > 0

    def __str__(self) -> str:
        return (
            f"keyed retries {'hold' if self.holds else 'VIOLATED'}: {self.kills} kills, "
            f"{self.retries} retries, {self.found} of them of what was published already | "
            f"{self.acknowledged} acknowledged, {self.missing} missing, {self.repeated} duplicates | "
            f"{self.seconds:.1f} s"
        )


def produce(dsn: str, slot: int, journal: Path, stop: Path) -> None:
    """Publishes one job after another, beginning with the one that its predecessor left without a word."""
    done = sum(kind == "ok" for kind, *_ in Journal.read(journal))
    begun = sum(kind == "invoke" for kind, *_ in Journal.read(journal))
    if begun > done:
        _retry_note(journal, done)
    chance = random.Random()
    notes = Journal(journal)
    with psycopg.connect(dsn) as connection:
        retrying = begun > done
        while not stop.exists() or retrying:
            if not retrying:
                notes.write("invoke", done)
            retrying = False
            given = uuid4()
            row = connection.execute(
                "select pgmb.publish('job', to_json(%s::text), id => %s, dedup_key => %s)",
                [f"{slot}/{done}", given, f"{slot}/{done}"],
            ).fetchone()
            time.sleep(chance.random() * 0.004)
            connection.commit()
            time.sleep(chance.random() * 0.004)
            if row is not None and row[0] != given:
                notes.write("found", done)
            notes.write("ok", done)
            done += 1
    notes.close()


def _retry_note(journal: Path, job: int) -> None:
    notes = Journal(journal)
    notes.write("retry", job)
    notes.close()


def run(dsn: str, folder: Path, *, kills: int, producers: int = 3, seed: int) -> Result:
    chance = random.Random(seed)
    began = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.queue.keyed"])
    stop = folder / "stop"
    journals = [folder / f"slot {slot}" for slot in range(producers)]
    running: list[ForkServerProcess] = []

    def start(slot: int) -> ForkServerProcess:
        process = context.Process(target=produce, args=(dsn, slot, journals[slot], stop), daemon=True)
        process.start()
        return process

    try:
        for slot, journal in enumerate(journals):
            journal.touch()
            running.append(start(slot))
        for _ in range(kills):
            victim = chance.randrange(producers)
            _wait_for_work(journals[victim])
            time.sleep(chance.random() * 0.02)
            running[victim].kill()
            running[victim].join(10)
            running[victim] = start(victim)
        for journal in journals:
            _wait_for_work(journal)
        stop.touch()
        for process in running:
            process.join(60)
            if process.exitcode != 0:
                raise RuntimeError(f"a producer ended with {process.exitcode}")
    finally:
        for process in running:
            process.kill()
            process.join(10)
    lines = [(slot, line) for slot, journal in enumerate(journals) for line in Journal.read(journal)]
    told = Counter(line[0] for _, line in lines)
    acknowledged = {f"{slot}/{line[1]}" for slot, line in lines if line[0] == "ok"}
    with psycopg.connect(dsn) as connection:
        published = Counter(
            job for (job,) in connection.execute("select payload #>> '{}' from pgmb.log_main").fetchall()
        )
    return Result(
        kills,
        told["retry"],
        told["found"],
        len(acknowledged),
        len(acknowledged - published.keys()),
        sum(count > 1 for count in published.values()),
        time.monotonic() - began,
    )


def _wait_for_work(journal: Path) -> None:
    """Until the process has got somewhere since it was started."""
    before = journal.stat().st_size
    deadline = time.monotonic() + STARTED_WITHIN
    while journal.stat().st_size < before + 50:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{journal.name} does not work")
        time.sleep(0.001)
