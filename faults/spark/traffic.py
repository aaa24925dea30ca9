"""The traffic that Spark reads: writers that commit late, rotation and retention, and as the control a reader
that trusts the sequence alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psycopg

from faults.crew import Crew
from faults.log.history import Event, Outcome, Reader
from faults.log.late_commits import Rotator
from faults.log.readers import SequenceCursor
from faults.spark.writers import RecordingWriter, prepare_record, recorded

BACKLOG = 3000
"""Events that may wait for Spark before writers pause: on a slow machine it would never catch up."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a reader got against what was committed."""

    committed: int
    lost: int
    phantom: int
    repeated: int

    @property
    def clean(self) -> bool:
        return self.committed > 0 and not (self.lost or self.phantom or self.repeated)

    def __str__(self) -> str:
        return f"{self.lost:,} lost, {self.phantom:,} phantom, {self.repeated:,} repeated"


def account(found: Iterable[Hashable], truth: Iterable[Hashable]) -> Account:
    """Compare what was found with what was committed. A changed event counts as lost and as a phantom."""
    got, committed = Counter(found), set(truth)
    return Account(
        committed=len(committed),
        lost=len(committed - got.keys()),
        phantom=len(got.keys() - committed),
        repeated=sum(count > 1 for count in got.values()),
    )


class Traffic:
    """Writers, a rotator that also drops what every reader has passed, and the control.

    `stored` says how many events have come to the end.
    """

    def __init__(
        self,
        dsn: str,
        stored: Callable[[], int],
        *,
        writers: int,
        delay: float,
        size: int,
        rotate_every: float,
        seed: int,
    ) -> None:
        self._dsn = dsn
        self._stored = stored
        self._gate = threading.Event()
        self._quiet, self._finished = threading.Event(), threading.Event()
        self._control = Reader("sequence cursor")
        self._writers = [
            RecordingWriter(
                number, dsn, gate=self._gate, delay=delay, size=size, seed=seed, finished=self._quiet
            )
            for number in range(1, writers + 1)
        ]
        self._rotator = Rotator(dsn, self._finished, rotate_every)
        self._crew = Crew()
        self._writing: list[threading.Thread] = []
        self._others: list[threading.Thread] = []

    def __enter__(self) -> Self:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            prepare_record(connection)
        control = SequenceCursor(self._dsn, self._control, self._finished)
        self._others = [
            self._crew.start("control", control.run),
            self._crew.start("rotator", self._rotator.run),
            self._crew.start("pacer", self._pace),
        ]
        self._writing = [self._crew.start(f"writer {writer.number}", writer.run) for writer in self._writers]
        return self

    def check(self) -> None:
        self._crew.check()

    def retain(self, keep_for: str) -> None:
        """From now on retention drops what is older and was passed by every reader."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("select pgmb.alter_stream('main', keep_for => %s::interval)", [keep_for])

    def quieten(self) -> None:
        """No more events; rotation and retention go on."""
        self._quiet.set()
        self._crew.join(*self._writing)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet.set()
        self._finished.set()
        if kind is None:
            self._crew.join(*self._writing, *self._others)

    def _pace(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._finished.is_set():
                row = connection.execute("select count(*) from recorded").fetchone()
                assert row is not None
                if row[0] - self._stored() < BACKLOG:
                    self._gate.set()
                else:
                    self._gate.clear()
                self._finished.wait(0.5)

    def truth(self) -> dict[int, Event]:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            return recorded(connection)

    @property
    def rolled_back(self) -> int:
        return sum(
            len(transaction.events)
            for writer in self._writers
            for transaction in writer.publisher.transactions
            if transaction.outcome is Outcome.ROLLED_BACK
        )

    @property
    def rotations(self) -> int:
        return self._rotator.rotations

    def control(self) -> Account:
        """What a reader by the highest sequence number made of the same traffic."""
        return account((delivery.event for delivery in self._control.deliveries), self.truth())

    def dropped_segments(self, patience: float) -> int:
        """How many segments retention has dropped; waits a while for the first."""
        deadline = time.monotonic() + patience
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while True:
                row = connection.execute(
                    "select count(*) from pgmb.segment where dropped_at is not null"
                ).fetchone()
                assert row is not None
                if row[0] or time.monotonic() >= deadline:
                    return int(row[0])
                time.sleep(0.1)
