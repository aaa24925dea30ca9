"""Late commits: many writers, commits delayed and rolled back, rotation meanwhile: nobody misses a thing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import psycopg

import pgmb
from faults.crew import Crew
from faults.log.history import Event, Reader, Verdict, judge
from faults.log.readers import Client, Consumer, SequenceCursor, Walker
from faults.log.writers import Writer, prepare


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    control: Verdict
    rotations: int
    seconds: float

    @property
    def holds(self) -> bool:
        return self.verdict.clean and bool(self.control.of("sequence cursor").missed)

    def __str__(self) -> str:
        return (
            f"late commits {'hold' if self.holds else 'VIOLATED'}: {self.verdict} | "
            f"{self.rotations} rotations in {self.seconds:.1f} s | control {self.control.findings[0]}"
        )


def is_order(event: Event) -> bool:
    """What the pattern order.* matches."""
    return event.topic in ("order.created", "order.paid")


def run(
    dsn: str, *, writers: int, events: int, delay: float, size: int, rotate_every: float, seed: int
) -> Result:
    """`events` committed events by `writers` sessions; commits wait up to `delay` seconds."""
    finished = threading.Event()
    with psycopg.connect(dsn, autocommit=True) as connection:
        prepare(connection)
        # The client's statement leaves the first numbers of a segment to receive.
        connection.execute("select setval('pgmb.seq_main', 5000)")
        for name, patterns in (
            *(("shared", ["#"]), ("single", ["#"]), ("claimed", ["#"])),
            ("orders", ["order.*"]),
        ):
            connection.execute(
                "select pgmb.create_queue(%s, %s, lease_for => '10 minutes')", [name, patterns]
            )
    shared, single, orders = Reader("shared"), Reader("single"), Reader("orders", wants=is_order)
    claimed, broker = Reader("claimed"), pgmb.connect(dsn)
    walking, ticking, cursor = Reader("walker"), Reader("ticks"), Reader("sequence cursor")
    readers: dict[str, Consumer | Client | Walker | SequenceCursor] = {
        "claimed 1": Client(broker, claimed, finished, size=3),
        "claimed 2": Client(broker, claimed, finished, size=5),
        "shared 1": Consumer(dsn, shared, finished, size=100, style="chained"),
        "shared 2": Consumer(dsn, shared, finished, size=37, style="chained"),
        "shared 3": Consumer(dsn, shared, finished, size=250, style="apart"),
        "single": Consumer(dsn, single, finished, size=500, style="relaxed"),
        "orders": Consumer(dsn, orders, finished, size=17, style="chained"),
        "walker": Walker(dsn, walking, finished, page=200),
        "ticks": Walker(dsn, ticking, finished, page=1000, ticks=True),
        "cursor": SequenceCursor(dsn, cursor, finished),
    }
    sessions = [
        Writer(number, dsn, events // writers, delay=delay, size=size, seed=seed)
        for number in range(1, writers + 1)
    ]
    rotator = Rotator(dsn, finished, rotate_every)
    crew = Crew()
    began = time.monotonic()
    reading = [crew.start(name, reader.run) for name, reader in readers.items()]
    rotating = crew.start("rotator", rotator.run)
    writing = [crew.start(f"writer {session.number}", session.run) for session in sessions]
    try:
        crew.join(*writing)
    finally:
        finished.set()
    crew.join(*reading, rotating)
    broker.close()
    publishers = [session.publisher for session in sessions]
    return Result(
        judge(publishers, [shared, single, claimed, orders, walking, ticking]),
        judge(publishers, [cursor]),
        rotator.rotations,
        time.monotonic() - began,
    )


class Rotator:
    """Opens a new segment now and then, and maintains."""

    def __init__(self, dsn: str, finished: threading.Event, every: float) -> None:
        self._dsn = dsn
        self._finished = finished
        self._every = every
        self.rotations = 0

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True, application_name="rotator") as connection:
            while not self._finished.wait(self._every):
                try:
                    row = connection.execute("select pgmb.rotate()").fetchone()
                    self.rotations += row is not None and row[0] is not None
                    connection.execute("select pgmb.maintain()")
                except psycopg.errors.LockNotAvailable:
                    continue
