"""SIGKILL to dispatchers at each step of a delivery: nothing is lost, and what comes again has the same id.

One dispatcher lives throughout; beside it, for every step, one that kills itself there, and then another.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from faults.crew import Crew
from faults.webhook.dispatching import LIAR, LIVE, PROCESS, STEPS
from faults.webhook.posted import Post, Verdict, judge
from harness.answers import failing_once
from harness.dispatchers import wait_settled
from harness.receiver import ReceiverProcess

ROOT = Path(__file__).parents[2]
HEALED_WITHIN = 30.0
"""Seconds after the last kill by which all that was published has arrived."""
_KILLED_WITHIN = 120.0
_OFTEN = ("before the post", "posted", "answered")
_ENDPOINTS = {"worker": "ab", "all": "ab", "some": "a", "once": "ab"}
"""Which kinds of events each is for; the first has a queue of its own, the last fails now and then."""
_SCHEDULE = ["100 ms"] * 30


@dataclass(frozen=True, slots=True)
class Result:
    kills: Counter[str]
    """By step."""
    verdict: Verdict
    control: Verdict
    """Of a dispatcher that does wrong: it must be seen to lose and to repeat."""
    healed_after: float
    seconds: float

    @property
    def repeated(self) -> Counter[str]:
        """By the step at which the process was killed that posted first."""
        found: Counter[str] = Counter()
        for process, posts in self.verdict.repeated.items():
            found[process.rsplit(" ", 1)[0]] += posts
        return found

    @property
    def holds(self) -> bool:
        return (
            self.verdict.clean
            # What was killed between a post and the end of settling it comes again: so the kills hit.
            and all(self.repeated[step] > 0 for step in ("posted", "answered", "settling"))
            and all(self.kills[step] > 0 for step in STEPS)
            and self.control.lost > 0
            and self.control.unexplained > 0
            and self.healed_after <= HEALED_WITHIN
        )

    def __str__(self) -> str:
        repeated = ", ".join(f"{step} {self.repeated[step]}" for step in STEPS)
        return (
            f"killed dispatchers {'hold' if self.holds else 'VIOLATED'}: {self.kills.total()} kills at "
            f"{len(self.kills)} steps | {self.verdict} ({repeated}) | "
            f"healed after {self.healed_after:.1f} s | control: {self.control} | {self.seconds:.1f} s"
        )


@dataclass
class Fleet:
    """Dispatchers, each a process that may end by its own hand."""

    dsn: str
    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)
    """Of those that were killed."""
    started: int = 0

    def start(self, step: str, at: int = 0) -> None:
        self.started += 1
        name = f"{step} {self.started}"
        with (self.folder / name).open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "faults.webhook.dispatching", step, str(at), name],
                cwd=ROOT,
                env={**os.environ, "PGMB_DSN": self.dsn},
                stdout=log,
                stderr=log,
            )

    def bury(self) -> list[str]:
        """The steps at which processes have killed themselves since the last look."""
        steps: list[str] = []
        for name, process in list(self.running.items()):
            if process.poll() is None:
                continue
            if process.returncode != -signal.SIGKILL:
                said = (self.folder / name).read_text()[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}: {said}")
            del self.running[name]
            self.names.add(name)
            steps.append(name.rsplit(" ", 1)[0])
        self.killed.update(steps)
        return steps

    def end(self) -> None:
        for process in self.running.values():
            process.terminate()
        for name, process in self.running.items():
            if process.wait(60) != 0:
                said = (self.folder / name).read_text()[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}: {said}")
        self.running.clear()

    def abandon(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait(10)


@dataclass
class Traffic:
    """Publishes small transactions, some of them rolled back, and knows what each endpoint should get."""

    dsn: str
    chance: random.Random
    meant: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in _ENDPOINTS})
    number: int = 0

    def transaction(self, connection: psycopg.Connection[Any]) -> None:
        events: list[tuple[int, str]] = []
        for _ in range(self.chance.randint(1, 4)):
            self.number += 1
            events.append((self.number, self.chance.choice("ab")))
        for number, kind in events:
            connection.execute("select pgmb.publish(%s, %s)", [f"t.{kind}", json.dumps({"n": number})])
        if self.chance.random() < 0.1:
            connection.rollback()
            return
        connection.commit()
        for number, kind in events:
            for endpoint, kinds in _ENDPOINTS.items():
                if kind in kinds:
                    self.meant[endpoint].add(number)

    def flow(self, stop: threading.Event, pace: float) -> None:
        with psycopg.connect(self.dsn) as connection:
            while not stop.wait(pace):
                self.transaction(connection)


def prepare(dsn: str, url: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "select pgmb.create('work', 't.*', 1000, pgmb.worker('worker', %s, null))", [f"{url}/worker"]
        )
        admin.execute("select pgmb.alter_queue('work', backoff_base => '100 ms', backoff_max => '200 ms')")
        for name, patterns in (("all", ["t.#"]), ("some", ["t.a"]), ("once", ["t.*"])):
            admin.execute(
                "select pgmb.create_endpoint(%s, %s, %s, retry_after => %s::interval[])",
                [name, f"{url}/{name}", patterns, _SCHEDULE],
            )
        # Each may take its part, those that were killed a moment ago included.
        admin.execute("update pgmb.endpoint set max_in_flight = 500, changed_at = clock_timestamp()")


def run(dsn: str, folder: Path, *, times: int, seed: int) -> Result:
    began = time.monotonic()
    chance = random.Random(seed)
    with ReceiverProcess(("webhook-id", PROCESS), {"once": failing_once}) as receiver:
        prepare(dsn, receiver.url)
        traffic = Traffic(dsn, chance)
        fleet = Fleet(dsn, folder)
        try:
            fleet.start(LIVE)
            crew, stop = Crew(), threading.Event()
            publishing = crew.start("publisher", lambda: traffic.flow(stop, 0.04))
            try:
                _kill(fleet, chance, times, crew)
            finally:
                stop.set()
            crew.join(publishing)
            healed_after = _drain(dsn)
            fleet.end()
            verdict = judge(_posts(receiver), traffic.meant, fleet.names)
            receiver.clear()
            control = _control(dsn, fleet, receiver, chance)
        finally:
            fleet.abandon()
    return Result(fleet.killed, verdict, control, healed_after, time.monotonic() - began)


def _kill(fleet: Fleet, chance: random.Random, times: int, crew: Crew) -> None:
    left = dict.fromkeys(STEPS, times)

    def start(step: str) -> None:
        left[step] -= 1
        fleet.start(step, chance.randint(1, 20 if step in _OFTEN else 4))

    for step in STEPS:
        start(step)
    last = time.monotonic()
    while len(fleet.running) > 1:
        for step in fleet.bury():
            last = time.monotonic()
            if left[step]:
                start(step)
        if time.monotonic() > last + _KILLED_WITHIN:
            raise TimeoutError(f"{sorted(fleet.running)} did not get to their steps")
        crew.check()
        time.sleep(0.02)


def _drain(dsn: str) -> float:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return wait_settled(connection, 4 * HEALED_WITHIN)


def _control(dsn: str, fleet: Fleet, receiver: ReceiverProcess, chance: random.Random) -> Verdict:
    traffic = Traffic(dsn, chance, number=1 << 40)
    fleet.start(LIAR)
    with psycopg.connect(dsn) as connection:
        for _ in range(20):
            traffic.transaction(connection)
    _drain(dsn)
    fleet.end()
    return judge(_posts(receiver), traffic.meant, ())


def _posts(receiver: ReceiverProcess) -> list[Post]:
    answered = receiver.answered()
    return [
        Post(
            request.path[1:],
            json.loads(request.body)["n"],
            request.headers["webhook-id"],
            request.headers[PROCESS],
            answered.get(number),
        )
        for number, request in enumerate(receiver.requests())
    ]
