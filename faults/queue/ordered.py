"""An ordered queue, its workers killed: per key, one event after another, in order; and how fast that is."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from faults.worker.handling import Handling, Verdict, judge, read, seconds_between

ROOT = Path(__file__).parents[2]
LEASE_FOR = 0.5
"""Seconds after which what a killed worker held comes again."""
READY_WITHIN = 60.0
_MORE_ROUNDS = 20
"""At most, until the control is out of order."""


@dataclass(frozen=True, slots=True)
class Drained:
    """One queue, drained once."""

    handled: list[Handling]
    kills: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    ordered: list[Verdict]
    control: list[Verdict]
    kills: int
    rate: float
    """Events a second, over all rounds."""
    control_rate: float
    goal: float
    seconds: float

    @property
    def ratio(self) -> float:
        return self.rate / self.control_rate

    @property
    def holds(self) -> bool:
        return (
            all(verdict.ordered and not verdict.lost for verdict in self.ordered)
            and all(not verdict.lost for verdict in self.control)
            and any(not verdict.ordered for verdict in self.control)
            and self.ratio >= self.goal
        )

    def __str__(self) -> str:
        return (
            f"ordered queue {'holds' if self.holds else 'VIOLATED'}: {len(self.ordered)} rounds of "
            f"{self.ordered[0]}, {self.kills} kills | {self.rate:,.0f}/s ordered, "
            f"{self.control_rate:,.0f}/s unordered, ratio {self.ratio:.2f} (goal {self.goal}) | "
            f"control: unordered {self.control[0]} | {self.seconds:.1f} s"
        )


@dataclass
class Fleet:
    """Workers on one queue, processes of their own; whoever is killed is replaced."""

    dsn: str
    queue: str
    folder: Path
    size: int
    bare: bool
    running: list[tuple[subprocess.Popen[bytes], Path]] = field(default_factory=list)
    killed: dict[Path, int] = field(default_factory=dict)
    diaries: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()

    def start(self) -> None:
        diary = self.folder / f"worker-{len(self.diaries) + 1}"
        diary.touch()
        environment = {
            **os.environ,
            "PGMB_DSN": make_conninfo(self.dsn, application_name=diary.name),
            "FAULTS_QUEUE": self.queue,
            "FAULTS_DIARY": str(diary),
            "FAULTS_SIZE": str(self.size),
        }
        command = (
            ["-m", "faults.worker.handlers"]
            if self.bare
            else ["-m", "pgmb", "work", "faults.worker.handlers:app", "--no-services"]
        )
        with diary.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        self.diaries.append(diary)
        self.running.append((process, diary))

    def kill_one(self, chance: random.Random) -> None:
        victim = self.running.pop(chance.randrange(len(self.running)))
        victim[0].kill()
        victim[0].wait(10)
        self.killed[victim[1]] = time.monotonic_ns()

    def end(self) -> None:
        for process, _ in self.running:
            process.terminate()
        for process, diary in self.running:
            # One that had hardly started knows no better than to die of it.
            if process.wait(30) not in (0, -signal.SIGTERM):
                said = diary.with_suffix(".log").read_text()[-2000:]
                raise RuntimeError(f"{diary.name} ended with {process.returncode}: {said}")

    def abandon(self) -> None:
        for process, _ in self.running:
            process.kill()
            process.wait(10)

    def handled(self) -> list[Handling]:
        return [one for diary in self.diaries for one in read(diary, self.killed.get(diary))]


def prepare(dsn: str, keys: int, events: int, shards: int | None, seed: int) -> dict[str, range]:
    """The same events for both queues: of all keys in turn by chance, the numbers of each key rising."""
    order = [key for key in range(keys) for _ in range(events)]
    random.Random(seed).shuffle(order)
    numbers = dict.fromkeys(range(keys), 0)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "select pgmb.create_queue('ordered', lease_for => %(lease)s, max_attempts => 99, ordered => 't',"
            " shards => %(shards)s),"
            " pgmb.create_queue('unordered', lease_for => %(lease)s, max_attempts => 99)",
            {"lease": f"{LEASE_FOR} s", "shards": shards},
        )
        with (
            connection.cursor() as cursor,
            cursor.copy("copy pgmb.log_main (topic, key, payload) from stdin") as copy,
        ):
            for key in order:
                copy.write_row(("t", f"key-{key}", str(numbers[key])))
                numbers[key] += 1
        connection.execute("vacuum analyze")
    return {f"key-{key}": range(events) for key in range(keys)}


def drain(
    dsn: str,
    queue: str,
    folder: Path,
    *,
    workers: int,
    size: int,
    bare: bool,
    kills: Kills,
    total: int,
) -> Drained:
    """From the beginning of the log to its end, by workers of which one is killed now and then."""
    fleet = Fleet(dsn, queue, folder, size, bare)
    try:
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(
                "select pgmb.pause(%(queue)s), pgmb.seek(%(queue)s, pgmb.earliest('main'))", {"queue": queue}
            )
            for _ in range(workers):
                fleet.start()
            _wait_for_sessions(admin, workers)
            admin.execute("select pgmb.resume(%s)", [queue])
            progress = Progress()
            looked = time.monotonic()
            while progress.look(fleet.diaries) < total:
                time.sleep(0.05)
                if kills.due(time.monotonic() - looked):
                    # Or a machine slower to start workers than we are to kill them would never get on.
                    _wait_for_worker(admin, fleet.diaries[-1].name)
                    fleet.kill_one(kills.chance)
                    fleet.start()
                looked = time.monotonic()
        fleet.end()
    finally:
        fleet.abandon()
    handled = fleet.handled()
    return Drained(handled, len(fleet.killed), seconds_between(handled))


class Kills:
    """One every so many seconds of draining, whichever queue it is that is drained; no more than `most`."""

    def __init__(self, every: float, seed: int, most: float) -> None:
        self.chance = random.Random(seed)
        self._every = every
        self._wait = every
        self._left = most

    def due(self, seconds: float) -> bool:
        self._wait -= seconds
        if self._wait > 0 or not self._left:
            return False
        self._wait += self._every
        self._left -= 1
        return True


class Progress:
    """How many different events were handled so far, read from diaries as they grow."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}
        self._done: set[bytes] = set()

    def look(self, diaries: Iterable[Path]) -> int:
        for path in diaries:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            for line in text[:whole].splitlines():
                if line.startswith(b"e "):
                    self._done.add(line[2:].rsplit(b" ", 2)[0])
        return len(self._done)


def _wait_for_worker(admin: psycopg.Connection[tuple[object, ...]], name: str) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if admin.execute("select from pg_stat_activity where application_name = %s", [name]).fetchall():
            return
        time.sleep(0.02)
    raise TimeoutError(f"{name} did not come up")


def _wait_for_sessions(admin: psycopg.Connection[tuple[object, ...]], workers: int) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        row = admin.execute(
            "select count(distinct application_name) from pg_stat_activity"
            " where datname = current_database() and query like '%pgmb.receive%' and pid <> pg_backend_pid()"
        ).fetchone()
        if row is not None and int(str(row[0])) >= workers:
            return
        time.sleep(0.02)
    raise TimeoutError("the workers did not come up")


def run(
    dsn: str,
    folder: Path,
    *,
    keys: int,
    events: int,
    workers: int,
    size: int,
    bare: bool,
    kill_every: float,
    rounds: int,
    shards: int | None,
    goal: float,
    seed: int,
    most_kills: float = math.inf,
) -> Result:
    began = time.monotonic()
    published = prepare(dsn, keys, events, shards, seed)
    verdicts: dict[str, list[Verdict]] = {"ordered": [], "unordered": []}
    seconds = {"ordered": 0.0, "unordered": 0.0}
    kills = 0
    killing = Kills(kill_every, seed, most_kills)
    for number in range(rounds + _MORE_ROUNDS):
        # One worker may process a few events alone, in order: the control then proves nothing.
        if number >= rounds and any(not verdict.ordered for verdict in verdicts["unordered"]):
            break
        # First the one, then the other: whatever slows the machine hits both.
        for queue in ("ordered", "unordered") if number % 2 == 0 else ("unordered", "ordered"):
            drained = drain(
                dsn,
                queue,
                folder / f"{queue}-{number}",
                workers=workers,
                size=size,
                bare=bare,
                kills=killing,
                total=keys * events,
            )
            verdicts[queue].append(judge(drained.handled, published))
            seconds[queue] += drained.seconds
            kills += drained.kills
    handled = len(verdicts["ordered"]) * keys * events
    rates = [handled / seconds[queue] for queue in ("ordered", "unordered")]
    return Result(
        verdicts["ordered"], verdicts["unordered"], kills, rates[0], rates[1], goal, time.monotonic() - began
    )
