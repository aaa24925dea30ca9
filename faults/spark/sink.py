"""Spark's sink while tasks and drivers fail, repeat and are killed: each event is published once."""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from faults.spark.console import Console, NotDoneError
from faults.spark.watch import Watch
from harness.processes import send
from harness.spark import Cluster

SETTINGS = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.2",
    "spark.task.maxFailures": "3",
}
REFUSED = "cut into other tasks before"


@dataclass(frozen=True, slots=True)
class Run:
    """What is published, how, and what goes wrong meanwhile."""

    case: str
    mode: str
    streaming: bool
    way: str = ""

    def __str__(self) -> str:
        kind = "a query" if self.streaming else "a job"
        return f"{self.case}{f' ({self.way})' if self.way else ''}, {kind}, {self.mode}"


SHAPES = list(itertools.product(("staged", "direct"), (True, False)))
BRIEF = [
    Run("retry", "staged", True, "error"),
    Run("retry", "direct", True, "killed"),
    Run("speculation", "direct", False),
    Run("layout", "direct", True),
    Run("before commit", "staged", True, "ended"),
    Run("after commit", "staged", True),
]


def full(number: int) -> Iterator[Run]:
    """So many runs, seven tenths with trouble in tasks, the rest with a killed driver."""
    kinds = [("retry", "error"), ("retry", "killed"), ("layout", ""), ("speculation", "")] * 2
    kinds += [("retry", "error"), ("layout", "")]
    late = [("before commit", way) for way in ("ended", "orphaned", "raced")] + [("after commit", "")] * 2
    every = [Run(case, mode, streaming, way) for case, way in kinds for mode, streaming in SHAPES]
    killed = [Run(case, mode, streaming, way) for case, way in late for mode, streaming in SHAPES]
    drivers = number * 3 // 10
    yield from itertools.islice(itertools.cycle(every), number - drivers)
    yield from itertools.islice(itertools.cycle(killed), drivers)


@dataclass(slots=True)
class Result:
    runs: Counter[str] = field(default_factory=Counter)
    events: int = 0
    refused: int = 0
    driver_kills: int = 0
    executor_kills: int = 0
    cleaned: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    left: int = 0
    seconds: float = 0

    @property
    def holds(self) -> bool:
        return not (self.wrong or self.lost or self.repeated or self.left) and self.events > 0

    def __str__(self) -> str:
        cases = ", ".join(f"{number} {case}" for case, number in sorted(self.runs.items()))
        return (
            f"spark sink {'holds' if self.holds else 'VIOLATED'}: {self.runs.total()} runs ({cases}), "
            f"{self.driver_kills} driver kills, {self.executor_kills} executor kills, "
            f"{self.refused} layouts refused, {self.events:,} events: "
            f"{self.lost:,} lost, {self.repeated:,} repeated, {self.left} stages left "
            f"({self.cleaned} cleaned by the next commit) in {self.seconds:.0f} s"
            + "".join(f"\n  WRONG {line}" for line in self.wrong)
        )


def run(dsn: str, cluster: Cluster, folder: Path, runs: list[Run], *, seed: int) -> Result:
    """One run after the other, in drivers that go on until they are killed."""
    began = time.monotonic()
    result = Result()
    with Watch(dsn) as watch:
        stand = Stand(dsn, cluster, folder, watch, result, random.Random(seed))
        try:
            for number, asked in enumerate(runs):
                publication = Publication(stand, asked, number)
                try:
                    CASES[asked.case](publication)
                except NotDoneError as error:
                    result.wrong.append(f"run {number}, {asked}: {str(error)[:2000]}")
                result.runs[asked.case] += 1
                publication.judge()
        finally:
            stand.close()
    result.seconds = time.monotonic() - began
    return result


class Stand:
    """What all runs share: the cluster, the driver of the moment, the database."""

    def __init__(
        self, dsn: str, cluster: Cluster, folder: Path, watch: Watch, result: Result, chance: random.Random
    ) -> None:
        self.dsn = dsn
        self.folder = folder
        self.watch = watch
        self.result = result
        self.chance = chance
        self._cluster = cluster
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        if self._console is None:
            self._console = Console(self._cluster, SETTINGS)
            self._console.do("warm")
        return self._console

    def kill_driver(self) -> None:
        if self._console is not None:
            self._console.kill()
            self._console = None
            self.result.driver_kills += 1

    def executors(self) -> list[int]:
        return self._cluster.executor_pids()

    def close(self) -> None:
        if self._console is not None:
            self._console.close()


class Publication:
    """What one run publishes: the numbers below `rows` under a topic of its own, in so many tasks."""

    def __init__(self, stand: Stand, asked: Run, number: int) -> None:
        self.stand = stand
        self.asked = asked
        self.topic = f"run-{number}"
        self.rows = stand.chance.randint(40, 400)
        self.tasks, self.other_tasks = stand.chance.sample(range(2, 5), 2)
        self._folder = stand.folder / self.topic
        if asked.streaming:
            self._add_file(self.rows)

    def ask(
        self,
        *,
        tasks: int | None = None,
        trouble: dict[str, Any] | None = None,
        version: int = 0,
        rows: int = 0,
    ) -> None:
        """Has the driver begin; whoever wants to know the end waits for the console."""
        options = {"url": self.stand.dsn, "topic": self.topic, "commitMode": self.asked.mode}
        what: dict[str, Any] = {"options": options, "partitions": tasks or self.tasks, "trouble": trouble}
        if self.asked.streaming:
            files, checkpoint = str(self._folder / "files"), str(self._folder / "checkpoint")
            self.stand.console.ask("follow_files", files=files, checkpoint=checkpoint, **what)
        else:
            options |= {"txnAppId": self.topic, "txnVersion": str(version)}
            self.stand.console.ask("publish", rows=rows or self.rows, **what)

    def do(self, **options: Any) -> None:
        self.ask(**options)
        self.stand.console.wait()

    def do_with_another_layout(self) -> None:
        """Staged it is published; directly it is refused, and then published as it was cut before."""
        if self.asked.mode == "staged":
            self.do(tasks=self.other_tasks)
            return
        try:
            self.do(tasks=self.other_tasks)
        except NotDoneError as error:
            if REFUSED not in str(error):
                raise
            self.stand.result.refused += 1
        else:
            self.stand.result.wrong.append(f"{self.topic}, {self.asked}: another layout was not refused")
        self.do()

    def judge(self) -> None:
        """Each number once, and nothing left over; the next commit may be needed for the latter."""
        result = self.stand.result
        got = Counter(self.stand.watch.published(self.topic))
        result.events += len(got)
        lost, repeated = self.rows - len(got), sum(got.values()) - len(got)
        result.lost += lost
        result.repeated += repeated
        if lost or repeated:
            result.wrong.append(f"{self.topic}, {self.asked}: {lost} lost, {repeated} repeated")
        if self.stand.watch.left():
            if self.asked.streaming:
                self._add_file(1)
            self.do(version=1, rows=1)
            result.cleaned += 1
        if left := self.stand.watch.left():
            result.left += left
            result.wrong.append(f"{self.topic}, {self.asked}: {left} stages or tasks left")

    def _add_file(self, rows: int) -> None:
        files = self._folder / "files"
        files.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": pa.array(range(rows), pa.int64())}), self._folder / "draft")
        (self._folder / "draft").rename(files / f"{len(list(files.iterdir()))}.parquet")


def retry(publication: Publication) -> None:
    """A task fails on its first attempt after all its rows, or with its executor once they are written."""
    stand = publication.stand
    if publication.asked.way == "error":
        publication.do(trouble={"task": 0, "attempts": 1, "linger": 0, "fail": True})
        return
    table, written = {
        "staged": ("pgmb.stage", "exists (select from pgmb.stage where app is not null)"),
        "direct": ("pgmb.ledger_task", "exists (select from pgmb.ledger_task where events is not null)"),
    }[publication.asked.mode]
    with stand.watch.held(table):
        publication.ask(tasks=1)
        stand.watch.wait_for_waiting(1, stand.console)
        executors = stand.executors()
        # The Python worker goes on, and its executor does not learn of it.
        for pid in executors:
            send(pid, signal.SIGSTOP)
    stand.watch.wait_until(written, stand.console)
    for pid in executors:
        send(pid, signal.SIGKILL)
    stand.result.executor_kills += len(executors)
    stand.console.wait()


def speculation(publication: Publication) -> None:
    """A task lingers after its rows until another attempt at it has begun, and as long again."""
    publication.do(trouble={"task": 0, "attempts": 1, "linger": 3, "fail": False})


def layout(publication: Publication) -> None:
    """A task fails for good after the others have written; then it is run again, cut into other tasks."""
    last = publication.tasks - 1
    try:
        publication.do(trouble={"task": last, "attempts": 99, "linger": 1, "fail": True})
    except NotDoneError as error:
        if "asked to fail" not in str(error):
            raise
    publication.do_with_another_layout()


def before_commit(publication: Publication) -> None:
    """The driver is killed while it waits to publish what its tasks have written.

    Then its session ends ("ended"), or goes on as an orphan and publishes ("orphaned"), or does so while the
    next driver does ("raced").
    """
    stand, way = publication.stand, publication.asked.way
    with _held_at_commit(publication):
        waiting = stand.watch.wait_for_waiting(1, stand.console)
        stand.kill_driver()
        if way == "ended":
            stand.watch.end(waiting)
        elif way == "raced":
            publication.ask(tasks=_tasks_again(publication))
            stand.watch.wait_for_waiting(2, stand.console)
    if way == "raced":
        stand.console.wait()
    elif way == "ended":
        publication.do_with_another_layout()
    else:
        publication.do(tasks=_tasks_again(publication))


def after_commit(publication: Publication) -> None:
    """The driver is killed when its commit has taken effect and before Spark knows."""
    stand = publication.stand
    before = stand.watch.applications()
    with _held_at_commit(publication):
        stand.watch.wait_for_waiting(1, stand.console)
        stand.console.freeze()
    stand.watch.wait_until(
        f"(select count(*) > {before} from pgmb.ledger where version is not null)", stand.console
    )
    stand.kill_driver()
    publication.do(tasks=_tasks_again(publication))


@contextmanager
def _held_at_commit(publication: Publication) -> Iterator[None]:
    """Has the run begin and holds its driver where it publishes."""
    watch = publication.stand.watch
    if publication.asked.mode == "staged":
        with watch.held("pgmb.ledger"):
            publication.ask()
            yield
    else:
        publication.ask(trouble={"task": 0, "attempts": 99, "linger": 1.5, "fail": False})
        with watch.held_version(publication.stand.console):
            yield


def _tasks_again(publication: Publication) -> int:
    """Directly, a run that is repeated has to be cut as before."""
    return publication.other_tasks if publication.asked.mode == "staged" else publication.tasks


CASES: dict[str, Callable[[Publication], None]] = {
    "retry": retry,
    "speculation": speculation,
    "layout": layout,
    "before commit": before_commit,
    "after commit": after_commit,
}
