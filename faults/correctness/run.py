"""What the programs share: a queue, publishers and consumers in threads, the drain at the end, the result."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from faults.correctness import application
from faults.correctness.application import Publisher
from faults.correctness.verdict import Ask, Ended, History, Verdict, judge
from faults.crew import Crew

QUEUE = "work-0"
"""The queue of a run that has one."""


@dataclass(frozen=True, slots=True)
class Result:
    what: str
    verdict: Verdict
    landed: bool
    """Whether the fault demonstrably happened."""
    notes: str
    seconds: float
    problems: Sequence[str] = field(default=())

    reports: bool = False
    """Whether it is a control, which must have its faults reported."""

    @property
    def holds(self) -> bool:
        return self.landed and not self.problems and self.verdict.holds is not self.reports

    def __str__(self) -> str:
        held = ("is reported" if self.reports else "holds") if self.holds else "VIOLATED"
        return (
            f"{self.what} {held}: {self.verdict} | {self.notes} | {self.seconds:.1f} s"
            + ("" if self.landed else " | the fault did not happen")
            + "".join(f"\n  {problem}" for problem in self.problems[:10])
        )


class Run:
    """Queues under one kind of fault. Work functions get a `random.Random` of their own.

    Each queue has events of its own, so every event belongs to one queue.
    """

    def __init__(
        self,
        dsn: str,
        *,
        seed: int,
        queues: int = 1,
        options: str = "",
        kinds: Mapping[str, str] | None = None,
        superseding: bool = False,
    ) -> None:
        """`kinds`: queues by name, with the options of each, instead of `queues` that have no others."""
        self.dsn = dsn
        own = kinds or {f"work-{number}": "" for number in range(queues)}
        self.queues = list(own)
        self.histories = {queue: History(queue, superseding=superseding) for queue in self.queues}
        self.stop = threading.Event()
        """Ends the faults; consumers then only drain."""
        self.published = threading.Event()
        """Ends the publishers."""
        self.drained = threading.Event()
        """Ends the consumers."""
        self.publishers: list[Publisher] = []
        self.crew = Crew()
        self._seed = seed
        self._threads: list[threading.Thread] = []
        self._began = time.monotonic()
        application.prepare(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for queue in self.queues:
                asked = ", ".join(filter(None, (options, own[queue])))
                self.histories[queue].ordered = "ordered => true" in asked
                # Attempts do not run out: what becomes a dead letter was buried.
                connection.execute(
                    f"select pgmb.create_queue('{queue}', array['{queue}'], max_attempts => 1000000,"
                    f" backoff_base => '0 s'{', ' + asked if asked else ''})"
                )

    @property
    def history(self) -> History:
        """The history of the only queue."""
        (only,) = self.histories.values()
        return only

    def publish(self, publishers: int, events: int, *, size: int, pause: float, keys: int = 5) -> None:
        """`events` in all, by so many publishers a queue, each with keys of its own."""
        share = events // (publishers * len(self.queues))
        for number in range(publishers * len(self.queues)):
            publisher = Publisher(number, keys, self.queues[number % len(self.queues)])
            self.publishers.append(publisher)
            flow = partial(publisher.flow, self.dsn, share, size, pause, self.published)
            self._threads.append(self.crew.start(f"publisher {number}", flow))

    def start(self, name: str, work: Callable[[random.Random], Any]) -> None:
        chance = random.Random(f"{self._seed} {name}")
        self._threads.append(self.crew.start(name, partial(work, chance)))

    def wait(self, seconds: float) -> None:
        """Lets the faults happen for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.crew.check()
            time.sleep(0.05)

    def wait_published(self) -> None:
        for thread in [thread for thread in self._threads if thread.name.startswith("publisher")]:
            self.crew.join(thread)

    def stop_publishing(self) -> None:
        self.published.set()

    def asked(self, queue: str, began: float) -> None:
        """Notes a receive that returned nothing."""
        self.histories[queue].empty.append(Ask(began, time.time()))

    def end(self, patience: float = 10.0) -> None:
        """Ends the faults once all is published, drains the queue and ends the threads.

        The drain lasts until everything is settled, or nothing was settled for `patience` seconds.
        """
        try:
            self.wait_published()
            self.stop.set()
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                left, since = application.unsettled(connection, self.queues), time.monotonic()
                while left and time.monotonic() < since + patience:
                    self.crew.check()
                    time.sleep(0.1)
                    now = application.unsettled(connection, self.queues)
                    if now != left:
                        left, since = now, time.monotonic()
        finally:
            self.stop.set()
            self.published.set()
            self.drained.set()
        self.crew.join(*self._threads, timeout=60)

    def refused(self) -> int:
        """How many deliveries ended with a settling call that was refused."""
        return sum(
            delivery.ended is Ended.LOST
            for history in self.histories.values()
            for delivery in history.deliveries
        )

    def result(
        self,
        what: str,
        notes: str = "",
        *,
        landed: bool = True,
        problems: Sequence[str] = (),
    ) -> Result:
        """The verdict on all that was published and settled."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for queue, history in self.histories.items():
                history.generations = application.generations(connection, queue)
            verdict = judge(
                application.published(connection, self.publishers),
                application.effects(connection),
                application.dead_letters(connection, self.queues),
                self.histories.values(),
            )
        longest = max(history.longest_call for history in self.histories.values())
        said = (
            f"{verdict.deliveries} deliveries, {verdict.dead} dead letters, longest receive {longest:.1f} s"
            + (f", {notes}" if notes else "")
        )
        return Result(what, verdict, landed, said, time.monotonic() - self._began, problems)


def rollback(connection: psycopg.Connection[Any]) -> None:
    """Ends a transaction that failed, also on a connection that is gone."""
    with suppress(psycopg.Error):
        connection.rollback()
