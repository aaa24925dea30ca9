"""Payloads that do not fit, handlers that raise, hang or end their process: all the rest goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from faults.worker.handling import read
from faults.worker.poison_app import MAX_ATTEMPTS
from harness.states import leases_in_flight, retries_waiting

ROOT = Path(__file__).parents[2]
FATAL = ("unfit", "raises", "hangs", "exits")
DONE_WITHIN = 240.0


@dataclass(frozen=True, slots=True)
class Result:
    jobs: Mapping[int, str]
    dead: int
    wrong: list[str]
    exits: int
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.wrong and self.exits > 0

    def __str__(self) -> str:
        counts = {kind: sum(one == kind for one in self.jobs.values()) for kind in ("fails-once", *FATAL)}
        return (
            f"poison {'holds' if self.holds else 'VIOLATED'}: {len(self.jobs)} events of which "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items())
            + f" | {self.dead} dead letters, {self.exits} processes lost, {len(self.wrong)} wrong"
            + "".join(f"\n  {what}" for what in self.wrong[:20])
            + f" | {self.seconds:.1f} s"
        )


@dataclass
class Judged:
    """What is said of each event: its dead letters, and in which attempts it was begun and done."""

    dead: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    begun: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    done: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def wrong(self, jobs: Mapping[int, str]) -> list[str]:
        found = [what for number, kind in jobs.items() if (what := self._wrong(number, kind))]
        strangers = set(self.dead) - set(jobs)
        return found + ([f"dead letters of nobody: {sorted(strangers)}"] if strangers else [])

    def _wrong(self, number: int, kind: str) -> str | None:
        dead, begun, done = self.dead[number], self.begun[number], self.done[number]
        said = f"{kind} {number}: dead {dead}, begun in attempts {begun}, done in {done}"
        if len(set(begun)) != len(begun) or any(not 1 <= attempt <= MAX_ATTEMPTS for attempt in begun):
            return f"an attempt twice, or one too many: {said}"
        if kind not in FATAL:
            right = not dead and bool(done) and (kind != "fails-once" or min(done) > 1)
            return None if right else f"not done: {said}"
        if len(dead) != 1 or done:
            return f"not dead once: {said}"
        ((attempt, error),) = dead
        if kind == "unfit":
            return None if not begun and "number" in error else f"an error that does not say it: {said}"
        return None if attempt == MAX_ATTEMPTS and begun else f"not after the last attempt: {said}"


def publish(dsn: str, events: int, seed: int) -> dict[int, str]:
    chance = random.Random(seed)
    rare = (
        ["unfit"] * max(1, events // 100)
        + ["raises"] * 6
        + ["fails-once"] * 10
        + ["hangs"] * 4
        + ["exits"] * 2
    )
    kinds = rare + ["fine"] * (events - len(rare))
    chance.shuffle(kinds)
    jobs = dict(enumerate(kinds))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "select pgmb.create_queue('jobs', '{job}', lease_for => '1 s', max_attempts => %s)",
            [MAX_ATTEMPTS],
        )
        payloads = [
            json.dumps({"kind": kind, "number": "none" if kind == "unfit" else number, "of": number})
            for number, kind in jobs.items()
        ]
        connection.execute(
            "select pgmb.publish_many(topics => array_fill('job'::text, array[%s]),"
            " payloads => %s::text[]::json[])",
            [events, payloads],
        )
    return jobs


def run(dsn: str, folder: Path, *, events: int, processes: int, seed: int) -> Result:
    began = time.monotonic()
    jobs = publish(dsn, events, seed)
    log = folder / "log"
    environment = {**os.environ, "PGMB_DSN": dsn, "FAULTS_DIARY": str(folder / "diary")}
    command = [
        sys.executable,
        "-m",
        "pgmb",
        "work",
        "faults.worker.poison_app:app",
        "--processes",
        str(processes),
        "--no-services",
    ]
    with log.open("wb") as output:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        with psycopg.connect(dsn, autocommit=True) as admin:
            dead = _wait_until_done(admin, worker)
        worker.send_signal(signal.SIGTERM)
        if worker.wait(60) != 0:
            raise RuntimeError(f"pgmb work ended with {worker.returncode}: {log.read_text()[-2000:]}")
    finally:
        worker.kill()
        worker.wait(10)
    judged = Judged()
    for number, attempt, error in dead:
        judged.dead[number].append((attempt, error))
    handled = read(folder / "diary")
    for one in handled:
        judged.begun[one.number].append(one.attempt)
        if one.finished:
            judged.done[one.number].append(one.attempt)
    exits = sum(one.key == "exits" for one in handled)
    return Result(jobs, len(dead), judged.wrong(jobs), exits, time.monotonic() - began)


def _wait_until_done(
    admin: psycopg.Connection[Any], worker: subprocess.Popen[bytes]
) -> list[tuple[int, int, str]]:
    """Until nothing waits, is leased or is to be tried again; then the dead letters."""
    deadline = time.monotonic() + DONE_WITHIN
    while time.monotonic() < deadline:
        if worker.poll() is not None:
            raise RuntimeError(f"pgmb work ended with {worker.returncode}")
        row = admin.execute("select pgmb.queue_depth('jobs')").fetchone()
        if row == (0,) and not retries_waiting(admin) and not leases_in_flight(admin):
            break
        time.sleep(0.1)
    return admin.execute(
        "select (payload ->> 'of')::int, attempt, error from pgmb.dead_letters('jobs', max => 100000)"
    ).fetchall()
