"""Rolling deploys under load: old and new workers of one app, restarted in random order, beside another app.

The new code has new topics, takes another payload, renames a handler and changes settings; another app has a
function of the same name. As soon as a new worker works, publishers use what is new. Every event must have
its effect, which the handlers write into a table of their own; none may be a dead letter, and nothing may
wait in the end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pgmb
from faults.crew import Crew
from faults.operations.deploy_apps import PROGRAMS
from harness.postgres import Server, create_database
from pgmb import schema

_WORKERS = 3
"""Of the old code, and as many of the new."""
_RESTARTS = 6
_OLD_TOPICS = ("order.created", "invoice.due", "shop.message", "office.message")
_NEW_TOPICS = (*_OLD_TOPICS, "order.refunded", "order.cancelled")
_PATIENCE_SECONDS = 180.0
"""For starts on a busy machine, and for released events, which wait for up to a minute."""
_BETWEEN_EVENTS_SECONDS = 0.01
_BETWEEN_LOOKS_SECONDS = 0.1
_numbers = itertools.count()


@dataclass
class Result:
    deploys: int = 0
    published: int = 0
    lost: int = 0
    dead: int = 0
    stuck: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.published > 0 and not (self.lost or self.dead or self.stuck)

    def __str__(self) -> str:
        figures = (
            f"{self.deploys} deploys, {self.published} events, {self.lost} lost, {self.dead} dead,"
            f" {self.stuck} stuck after the deploy"
        )
        return "\n".join([*self.remarks, figures])


def run(server: Server, runs: int, seed: int) -> Result:
    result = Result()
    for number in range(runs):
        dsn = server.dsn(create_database(server))
        schema.install(dsn)
        with tempfile.TemporaryDirectory(prefix="pgmb-deploy-") as folder:
            _Deploy(dsn, Path(folder), random.Random(f"{seed} {number}")).run(result)
        result.deploys += 1
    return result


class _Deploy:
    def __init__(self, dsn: str, folder: Path, chance: random.Random) -> None:
        self._dsn = dsn
        self._folder = folder
        self._chance = chance
        self._environment = {
            **os.environ,
            "DEPLOY_DSN": dsn,
            "PYTHONPATH": str(Path(pgmb.__file__).parents[1]),
        }
        self._topics: tuple[str, ...] = _OLD_TOPICS
        self._published: dict[int, str] = {}
        self._ending = False
        for name, (module, text) in PROGRAMS.items():
            (folder / name).mkdir()
            (folder / name / f"{module}.py").write_text(text)

    def run(self, result: Result) -> None:
        crew = Crew()
        with contextlib.ExitStack() as stack, pgmb.connect(self._dsn) as broker:
            with broker.connection() as conn:
                conn.execute("create table effect (number int primary key, by text not null)")
            old = [stack.enter_context(self._worker("old")) for _ in range(_WORKERS)]
            office = stack.enter_context(self._worker("office"))
            self._until(lambda: all(one.works for one in (*old, office)), "the old workers work")
            publishing = crew.start("publish", lambda: self._publish(broker))
            new = [stack.enter_context(self._worker("new")) for _ in range(_WORKERS)]
            self._until(lambda: any(one.works for one in new), "a new worker works")
            self._topics = _NEW_TOPICS
            workers = [*old, *new, office]
            for _ in range(_RESTARTS):
                crew.check()
                self._chance.choice(workers).restart()
                time.sleep(self._chance.uniform(0, 0.5))
            for worker in old:
                worker.stop()
            self._ending = True
            crew.join(publishing)
            with contextlib.suppress(TimeoutError):
                self._until(lambda: not (self._missing(broker) or self._waiting(broker)), "all is done")
            self._judge(broker, result)

    def _publish(self, broker: pgmb.Broker) -> None:
        number = 0
        while not self._ending:
            topic = self._chance.choice(self._topics)
            payload: dict[str, object] = {"number": number}
            if topic == "order.created":
                changed = self._topics is _NEW_TOPICS and self._chance.random() < 0.5
                payload["amount"] = "12.50 EUR" if changed else 12
            self._published[number] = topic
            broker.publish(topic, payload)
            number += 1
            time.sleep(_BETWEEN_EVENTS_SECONDS)

    def _judge(self, broker: pgmb.Broker, result: Result) -> None:
        missing = self._missing(broker)
        letters = [letter for one in broker.queue_status() for letter in broker.dead_letters(one.queue)]
        result.published += len(self._published)
        result.stuck += self._waiting(broker)
        result.dead += len(letters)
        # What waits or died is not lost, if it can be found.
        result.lost += max(0, len(missing) - self._waiting(broker) - len(letters))
        topics = sorted({self._published[number] for number in missing})
        if missing:
            result.remarks.append(f"{len(missing)} events without an effect, of {', '.join(topics)}")
        result.remarks += sorted({f"dead: {letter.error}" for letter in letters})

    def _missing(self, broker: pgmb.Broker) -> list[int]:
        with broker.connection() as conn:
            found = {number for (number,) in conn.execute("select number from effect")}
        return [number for number in self._published if number not in found]

    def _waiting(self, broker: pgmb.Broker) -> int:
        waiting = 0
        for one in broker.queue_status():
            waiting += (broker.queue_depth(one.queue) or 0) + (one.leases or 0) + (one.retries or 0)
        return waiting

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _PATIENCE_SECONDS
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {_PATIENCE_SECONDS:.0f} s: {what}")
            time.sleep(_BETWEEN_LOOKS_SECONDS)

    @contextlib.contextmanager
    def _worker(self, program: str) -> Generator[_Worker]:
        worker = _Worker(self._folder / program, PROGRAMS[program][0], self._environment)
        try:
            yield worker
        finally:
            worker.stop()


class _Worker:
    """`pgmb work` in a process of its own."""

    def __init__(self, folder: Path, module: str, environment: dict[str, str]) -> None:
        self._folder = folder
        self._command = [sys.executable, "-m", "pgmb", "work", f"{module}:app"]
        self._environment = environment
        self._log = folder / f"log-{next(_numbers)}.txt"
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def works(self) -> bool:
        """Whether it has started, and every process before it in this place."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a worker did not start: {self._log.read_text()[-2000:]}")
        return self._log.read_text().count("working on") >= self._starts

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(40)
