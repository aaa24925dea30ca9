"""A full queue drops its oldest events beside publishers: no event above those that it drops is lost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import psycopg

from faults.crew import Crew

LENGTH = 500
"""max_length of the queue."""
_FILLED = 2 * LENGTH
"""Events that wait before the first receive of a session, at least."""


@dataclass(frozen=True, slots=True)
class Result:
    cycles: int
    dropped: int
    """Cycles whose first receive dropped events."""
    delivered: int
    lost: int
    """Events above the first one delivered in a cycle that were not delivered."""
    doubled: int
    seconds: float

    @property
    def holds(self) -> bool:
        return self.dropped == self.cycles and self.lost == self.doubled == 0

    def __str__(self) -> str:
        return (
            f"dropping {'holds' if self.holds else 'VIOLATED'}: {self.lost} of the newest events lost, "
            f"{self.doubled} delivered twice | {self.delivered} delivered in {self.cycles} cycles, "
            f"{self.dropped} dropped the oldest | {self.seconds:.1f} s"
        )


class Gate:
    """Lets publishers publish LENGTH events each time it is opened: too few for a second drop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._publishing = 0
        self._left = 0
        self._ended = False

    def enter(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0 or self._ended)
            if self._ended:
                return False
            self._left -= 1
            self._publishing += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._publishing -= 1
            self._changed.notify_all()

    def open(self) -> None:
        """Returns when all publishers are at work."""
        with self._changed:
            self._left = LENGTH
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._left < LENGTH - 20)

    def close(self) -> None:
        """Waits until no publisher is in the middle of an event."""
        with self._changed:
            self._left = 0
            self._changed.wait_for(lambda: self._publishing == 0)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def run(dsn: str, *, cycles: int, publishers: int = 4) -> Result:
    """Each cycle fills the queue beyond its length, and a session of its own receives what is left of it."""
    began = time.monotonic()
    gate, crew = Gate(), Crew()
    delivered = dropped = lost = doubled = 0
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "select pgmb.create_queue('short', '{t}', max_length => %s, when_full => 'drop_oldest')", [LENGTH]
        )
        threads = [crew.start(f"publisher {n}", lambda: _publish(dsn, gate)) for n in range(publishers)]
        try:
            for _ in range(cycles):
                crew.check()
                before = _last(admin)
                admin.execute(
                    "insert into pgmb.log_main (topic, payload) select 't', '1' from generate_series(1, %s)",
                    [_FILLED],
                )
                with psycopg.connect(dsn, autocommit=True) as session:
                    gate.open()
                    got = _receive(session)
                    gate.close()
                    while more := _receive(session):
                        got += more
                expected = admin.execute(
                    "select count(*) from pgmb.log_main e where e.seq >= %s", [min(got)]
                ).fetchall()[0][0]
                delivered += len(got)
                doubled += len(got) - len(set(got))
                lost += expected - len(set(got))
                dropped += min(got) > before + 1
        finally:
            gate.end()
        crew.join(*threads)
    return Result(cycles, dropped, delivered, lost, doubled, time.monotonic() - began)


def _publish(dsn: str, gate: Gate) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        while gate.enter():
            try:
                connection.execute("select pgmb.publish('t', '1')")
            finally:
                gate.leave()


def _receive(session: psycopg.Connection[Any]) -> list[int]:
    """The numbers of the next events, settled."""
    rows = session.execute("select lease, seq from pgmb.receive('short', %s)", [2 * LENGTH]).fetchall()
    if rows:
        session.execute("select pgmb.ack(%s)", [rows[0][0]])
    return [seq for _, seq in rows]


def _last(connection: psycopg.Connection[Any]) -> int:
    return int(connection.execute("select last_value from pgmb.seq_main").fetchall()[0][0])
