"""Rotation, sealing, retention and dropping under load, with a publisher stopped in the midst of its work."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg

from faults.crew import Crew
from faults.log.history import Event, Outcome, Publisher, Reader, Verdict, judge
from faults.log.readers import Consumer, Walker
from faults.log.writers import Writer
from harness.postgres import Server

SETTINGS: dict[str, Any] = {
    # The server itself writes down every wait for a lock that is longer than this, and how long it was.
    "log_lock_waits": True,
    "deadlock_timeout": "20ms",
    "log_line_prefix": "%m [%p] <%a> ",
    # Tells when a writer of a segment committed, to compare with the time of sealing.
    "track_commit_timestamp": True,
}
LONGEST_WAIT = 100.0
"""No publisher waits longer for a lock, in milliseconds."""

_WAIT = re.compile(
    r"<(?P<who>[^>]*)> LOG:  process \d+ (?:still waiting for|acquired) (?P<what>.+) after (?P<ms>[\d.]+) ms"
)


@dataclass(slots=True)
class Maintenance:
    """What was done to the log meanwhile."""

    rotations: int = 0
    sealed: int = 0
    dropped: int = 0
    detached: int = 0
    postponed: int = 0
    early: list[str] = field(default_factory=list)
    """Segments that were sealed although a writer was yet to commit to them."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One time that the publisher was stopped: in what, over how many rotations, and what that kept open."""

    work: str
    rotations: int
    kept_open: int


@dataclass(frozen=True, slots=True)
class Result:
    verdict: Verdict
    maintenance: Maintenance
    stops: list[Stop]
    longest_wait: float
    waits: list[str]
    seconds: float

    @property
    def landed(self) -> bool:
        """Whether the stops hit what they were meant to hit, and all kinds of maintenance happened."""
        work = self.maintenance
        return (
            all(stop.rotations >= 2 for stop in self.stops)
            and all(stop.kept_open >= 2 for stop in self.stops if stop.work != "idle")
            and min(work.rotations, work.sealed, work.dropped) > 0
        )

    @property
    def holds(self) -> bool:
        return (
            self.landed
            and self.verdict.clean
            and not self.maintenance.early
            and self.longest_wait <= LONGEST_WAIT
        )

    def __str__(self) -> str:
        work = self.maintenance
        stops = ", ".join(
            f"{s.work} over {s.rotations} rotations keeping {s.kept_open} open" for s in self.stops
        )
        waited = f"{self.longest_wait:.0f} ms" if self.waits else "under 20 ms"
        return (
            f"rotation {'holds' if self.holds else 'VIOLATED'}: {self.verdict} | {work.rotations} rotations, "
            f"{work.sealed} sealed, {len(work.early)} early, {work.dropped} dropped, "
            f"{work.detached} detached apart ({work.postponed} postponed) | stopped: {stops} | "
            f"longest lock wait of a publisher: {waited} ({len(self.waits)} over 20 ms) | "
            f"{self.seconds:.1f} s"
            + "".join(f"\n  {line}" for line in [*work.early, *self.waits[:5]] if not self.holds)
        )


def run(server: Server, dsn: str, *, stopped_for: float, rounds: int, publishers: int, seed: int) -> Result:
    """`rounds` times a publisher is stopped for so many seconds, in three different moments of its work."""
    finished, drained = threading.Event(), threading.Event()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.alter_stream('main', rotate_every => '0.9 s', keep_for => '2 s')")
        for name in ("first", "second"):
            connection.execute("select pgmb.create_queue(%s, lease_for => '10 minutes')", [name])
    first, second, walking = Reader("first"), Reader("second"), Reader("walker")
    readers: list[Consumer | Walker] = [
        Consumer(dsn, first, drained, size=200, style="chained", idle=0.05),
        Consumer(dsn, first, drained, size=50, idle=0.05),
        Consumer(dsn, second, drained, size=500, idle=0.05),
        Walker(dsn, walking, drained, page=500, confirms=True),
    ]
    writers = [
        Writer(number, dsn, 1 << 30, delay=0.02, size=20, seed=seed, serialise=False, finished=finished)
        for number in range(1, publishers + 1)
    ]
    janitor = Janitor(dsn, finished)
    crew = Crew()
    began = time.monotonic()
    reading = [crew.start(f"reader {number}", reader.run) for number, reader in enumerate(readers)]
    working = [crew.start("janitor", janitor.run)]
    working += [crew.start(f"writer {writer.number}", writer.run) for writer in writers]
    victim = Victim(dsn, number=0)
    try:
        janitor.wait_for(3, crew)
        stops = [
            victim.stop(work, stopped_for, janitor, crew)
            for _ in range(rounds)
            for work in ("copy", "open", "idle")
        ]
        janitor.wait_for_a_drop(crew)
        finished.set()
        crew.join(*working)
    finally:
        finished.set()
        victim.close()
        drained.set()
    crew.join(*reading)
    verdict = judge([victim.publisher, *(writer.publisher for writer in writers)], [first, second, walking])
    waits = _publishers_waits(server)
    return Result(
        verdict,
        janitor.done,
        stops,
        max((wait for wait, _ in waits), default=0.0),
        [line for _, line in sorted(waits, reverse=True)],
        time.monotonic() - began,
    )


class Janitor:
    """Maintains once a second, looks over what was sealed, and detaches what was emptied."""

    def __init__(self, dsn: str, finished: threading.Event) -> None:
        self._dsn = dsn
        self._finished = finished
        self._looked_at: set[int] = set()
        self.done = Maintenance()

    def wait_for(self, rotations: int, crew: Crew) -> None:
        goal = self.done.rotations + rotations
        while self.done.rotations < goal:
            crew.check()
            time.sleep(0.02)

    def wait_for_a_drop(self, crew: Crew) -> None:
        """Readers on a busy machine lag by seconds, and what they have not read is kept."""
        deadline = time.monotonic() + 30
        while not self.done.dropped and time.monotonic() < deadline:
            crew.check()
            time.sleep(0.02)

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True, application_name="janitor") as connection:
            connection.execute("set lock_timeout = '50ms'")
            while not self._finished.wait(1.0):
                connection.execute("select pgmb.maintain()")
                self._count(connection)
                self._look_for_early_seals(connection)
                self._detach(connection)

    def _count(self, connection: psycopg.Connection[Any]) -> None:
        row = connection.execute(
            "select count(closed_at), count(sealed_at), count(dropped_at) from pgmb.segment"
        ).fetchone()
        assert row is not None
        self.done.rotations, self.done.sealed, self.done.dropped = row

    def _look_for_early_seals(self, connection: psycopg.Connection[Any]) -> None:
        sealed = connection.execute(
            "select number, format('pgmb.segment_%s_%s', stream, number), sealed_at, last_seq, max_xid::text"
            " from pgmb.segment where sealed_at is not null and dropped_at is null"
        ).fetchall()
        for number, leaf, sealed_at, last_seq, max_xid in sealed:
            row = connection.execute(
                "select count(*) filter (where pg_xact_commit_timestamp(e.xid::xid) > %s),"
                f" max(e.seq), max(e.xid)::text from {leaf} e",
                [sealed_at],
            ).fetchone()
            if row != (0, last_seq, max_xid):
                self.done.early.append(f"segment {number} sealed with {(0, last_seq, max_xid)}, holds {row}")

    def _detach(self, connection: psycopg.Connection[Any]) -> None:
        """Ages what was emptied, so that it may go, and detaches what pgmb.detach_dropped() leaves."""
        connection.execute(
            "update pgmb.segment set dropped_at = dropped_at - interval '1 minute'"
            " where dropped_at between clock_timestamp() - interval '1 minute'"
            " and clock_timestamp() - interval '3 seconds'"
        )
        for leaf, pending in connection.execute(
            "select i.inhrelid::regclass::text, i.inhdetachpending from pgmb.segment s"
            " join pg_inherits i"
            " on i.inhrelid = to_regclass(format('pgmb.segment_%s_%s', s.stream, s.number))"
            " where s.dropped_at < clock_timestamp() - interval '1 minute' order by s.number limit 1"
        ).fetchall():
            try:
                how = "finalize" if pending else "concurrently"
                connection.execute(f"alter table pgmb.log_main detach partition {leaf} {how}")
                connection.execute(f"drop table {leaf}")
            except (psycopg.errors.LockNotAvailable, psycopg.errors.ObjectInUse):
                self.done.postponed += 1
                return
            self.done.detached += 1


class Victim:
    """A publisher in a process of its own, to be stopped by SIGSTOP in the middle of its work."""

    def __init__(self, dsn: str, number: int) -> None:
        self.publisher = Publisher()
        self._dsn = dsn
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=publish_on_command, args=(dsn, number, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def stop(self, work: str, seconds: float, janitor: Janitor, crew: Crew) -> Stop:
        pid = self._process.pid
        assert pid is not None
        transaction = self.publisher.begin()
        self._pipe.send(work)
        self._expect("ready")
        os.kill(pid, signal.SIGSTOP)
        before = janitor.done.rotations
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or janitor.done.rotations < before + 2:
            crew.check()
            time.sleep(0.02)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state != "T":
            raise RuntimeError(f"the publisher was not stopped but {state}")
        rotations = janitor.done.rotations - before
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            row = connection.execute(
                "select clock_timestamp(), count(*) from pgmb.segment"
                " where closed_at is not null and sealed_at is null"
            ).fetchone()
            assert row is not None
            resumed_at, kept_open = row
            self._pipe.send("go")
            os.kill(pid, signal.SIGCONT)
            segments, transaction.events = self._expect("committed")
            transaction.outcome = Outcome.COMMITTED
            early = connection.execute(
                "select number from pgmb.segment where number = any (%s) and sealed_at < %s",
                [segments, resumed_at],
            ).fetchall()
        janitor.done.early.extend(f"segment {number} under a stopped writer" for (number,) in early)
        return Stop(work, rotations, kept_open)

    def _expect(self, word: str) -> Any:
        if not self._pipe.poll(30):
            raise TimeoutError(f"the publisher never said {word}")
        said, *rest = self._pipe.recv()
        if said != word:
            raise RuntimeError(f"the publisher said {said} {rest} instead of {word}")
        return rest

    def close(self) -> None:
        self._pipe.close()
        if self._process.pid is not None:
            # It may have ended with its pipe.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)
        self._process.join(5)
        self._process.kill()


def publish_on_command(dsn: str, number: int, pipe: Connection) -> None:
    """Publishes as told, pausing in the middle of it until told to go on. Runs in a process of its own."""
    name = number << 32
    with psycopg.connect(dsn, application_name="publisher victim") as connection:
        while True:
            try:
                work = pipe.recv()
            except EOFError:
                return
            events = [Event(name + i, f"victim-{number}", name + i, "victim") for i in range(1, 6001)]
            if work != "copy":
                events = events[:6]
            name += len(events)
            try:
                if work == "copy":
                    _copy(connection, events, pipe)
                else:
                    half = len(events) // 2 if work == "open" else 0
                    _publish(connection, events[:half])
                    _pause(pipe)
                    _publish(connection, events[half:])
                # Not a publisher's work: its waits, which may be for a reader's locks, do not count as such.
                connection.execute("set local application_name = 'looking'")
                row = connection.execute(
                    "select array_agg(distinct (seq >> 40)::int) from pgmb.log_main"
                    " where xid = pg_current_xact_id()"
                ).fetchone()
                assert row is not None
                connection.commit()
            except psycopg.Error as error:
                pipe.send(("failed", repr(error)))
                return
            pipe.send(("committed", row[0], events))


def _pause(pipe: Connection) -> None:
    pipe.send(("ready",))
    pipe.recv()


def _publish(connection: psycopg.Connection[Any], events: list[Event]) -> None:
    for event in events:
        connection.execute(
            "select pgmb.publish(%s, %s::text::json, key => %s)", [event.topic, str(event.name), event.key]
        )


def _copy(connection: psycopg.Connection[Any], events: list[Event], pipe: Connection) -> None:
    with (
        connection.cursor() as cursor,
        cursor.copy("copy pgmb.log_main (topic, key, payload) from stdin") as copy,
    ):
        for place, event in enumerate(events):
            if place == len(events) * 3 // 4:
                _pause(pipe)
            copy.write_row((event.topic, event.key, str(event.name)))


def _publishers_waits(server: Server) -> list[tuple[float, str]]:
    """The waits of publishers for locks, in milliseconds, as the server wrote them down."""
    found = (_WAIT.search(line) for line in server.log_text().splitlines())
    return [
        (float(wait["ms"]), f"{wait['who']}: {wait['what']} {wait['ms']} ms")
        for wait in found
        if wait is not None and wait["who"].startswith("publisher")
    ]
