"""`pgmb work` alone keeps the log in order while handlers block and its upkeep is killed or stopped.

One worker runs beside a publisher and a consumer, and its handler blocks the event loop. Segments must be
dropped, claims cleared and each due time of a schedule fired once. Then the process of the upkeep gets
SIGKILL, and when a second worker runs, the leading one gets SIGSTOP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

import pgmb
from harness import processes
from harness.states import kept_claims
from harness.waiting import until_true

ROOT = Path(__file__).resolve().parents[2]
_MAINTAINED_WITHIN_SECONDS = 6.0
_BACK_WITHIN_SECONDS = 15.0
# maintain() keeps claims of the last ten seconds, for status.
_CLEARED_WITHIN_SECONDS = 20.0
_LOOK_EVERY_SECONDS = 0.2


@dataclass
class Result:
    rotated: int = 0
    dropped: int = 0
    overkept: float = 0.0
    """Seconds for which an event was kept beyond retention and one rotation."""
    uncleared: float = 0.0
    """The oldest settled claim at the end, in seconds."""
    cleared: int = 0
    due: int = 0
    fired: int = 0
    gap: float = 0.0
    """The longest time without maintain() while only handlers were at fault, in seconds."""
    killed: float = 0.0
    stopped: float = 0.0

    @property
    def holds(self) -> bool:
        return (
            self.dropped > 0
            and self.overkept <= _MAINTAINED_WITHIN_SECONDS
            and self.cleared > 0
            and self.uncleared <= _CLEARED_WITHIN_SECONDS
            and self.fired == self.due > 0
            and self.gap <= _MAINTAINED_WITHIN_SECONDS
            and max(self.killed, self.stopped) <= _BACK_WITHIN_SECONDS
        )

    def __str__(self) -> str:
        return (
            f"{self.dropped} of {self.rotated} segments dropped, at most {self.overkept:.1f} s late,"
            f" {self.cleared} claims cleared, the oldest left {self.uncleared:.1f} s,"
            f" {self.fired} of {self.due} due times fired, maintain() at most {self.gap:.1f} s apart,"
            f" back {self.killed:.1f} s after SIGKILL and {self.stopped:.1f} s after SIGSTOP"
        )


def run(dsn: str, folder: Path, *, seconds: float, rotate_every: float, block: float) -> Result:
    result = Result()
    with pgmb.connect(dsn) as broker, psycopg.connect(dsn, autocommit=True) as admin:
        broker.create_stream("slow")
        broker.alter_stream("main", rotate_every=rotate_every, keep_for=rotate_every)
        broker.create_queue("q", ["beat", "traffic"])
        with _worker(dsn, folder / "first"):
            until_true(lambda: _maintained(admin) < _MAINTAINED_WITHIN_SECONDS)
            broker.create_schedule("beat", "* * * * * *", "beat", missed="all")
            began = _database_second(admin)
            ending = time.monotonic() + seconds
            stop = threading.Event()
            traffic = threading.Thread(target=_traffic, args=(dsn, stop, block, result))
            traffic.start()
            try:
                while time.monotonic() < ending:
                    time.sleep(_LOOK_EVERY_SECONDS)
                    result.gap = max(result.gap, _maintained(admin))
                    result.overkept = max(result.overkept, _overkept(admin, rotate_every))
                result.killed = _until_another_leads(admin, signal.SIGKILL)
                with _worker(dsn, folder / "second") as second:
                    # Its upkeep runs, and waits.
                    until_true(lambda: len(processes.children(second)) == 2)
                    until_true(lambda: "leads no service" in (folder / "second").read_text())
                    stopped = _leader(admin)
                    result.stopped = _until_another_leads(admin, signal.SIGSTOP)
                    # The due times of the time without a scheduler.
                    until_true(lambda: _overdue(admin) < 1.0)
                    broker.drop_schedule("beat")
                    result.due = _database_second(admin) - began
                    until_true(lambda: result.fired >= result.due - 1)
                    if stopped is not None:
                        processes.send(stopped, signal.SIGCONT)
            finally:
                stop.set()
                traffic.join()
        _judge(admin, result)
    return result


def _judge(admin: psycopg.Connection[Any], result: Result) -> None:
    # A schedule counts seconds of the clock, and the two looks at it are within one.
    if abs(result.fired - result.due) <= 1:
        result.due = result.fired
    row = admin.execute(
        "select count(*) filter (where closed_at is not null), count(*) filter (where dropped_at is not null)"
        " from pgmb.segment"
    ).fetchone()
    assert row is not None
    result.rotated, result.dropped = row
    row = admin.execute(
        "select coalesce(extract(epoch from uncleared_for), 0)::float8"
        " from pgmb.queue_health() where queue = 'q'"
    ).fetchone()
    assert row is not None
    result.uncleared = row[0]
    result.cleared = max(0, result.cleared - kept_claims(admin))


def _traffic(dsn: str, stop: threading.Event, block: float, result: Result) -> None:
    """Publish, receive and ack; and have the worker's handler block, again and again."""
    blocked_at = float("-inf")
    with pgmb.connect(dsn) as broker:
        while True:
            ended = stop.is_set()
            if not ended:
                broker.publish("traffic", {})
            if not ended and time.monotonic() > blocked_at + block:
                blocked_at = time.monotonic()
                broker.publish("block", block, stream="slow")
            lease = broker.receive("q", 100)
            result.fired += sum(event.topic == "beat" for event in lease)
            if lease:
                lease.ack()
                result.cleared += 1
            elif ended:
                return
            time.sleep(0.05)


def _until_another_leads(admin: psycopg.Connection[Any], number: int) -> float:
    """Send a signal to the leader. Seconds until another process leads and has run maintain()."""
    former = _leader(admin)
    assert former is not None
    began = time.monotonic()
    os.kill(former, number)
    until_true(lambda: _leader(admin) not in (None, former))
    until_true(lambda: _maintained(admin) < time.monotonic() - began)
    return time.monotonic() - began


def _leader(admin: psycopg.Connection[Any]) -> int | None:
    row = admin.execute(
        "select pid from pgmb.describe_leaders() where service = 'janitor' and alive"
    ).fetchone()
    return None if row is None else int(row[0])


def _maintained(admin: psycopg.Connection[Any]) -> float:
    """Seconds since maintain() ended last."""
    row = admin.execute(
        "select coalesce(extract(epoch from maintained_age), 'inf')::float8 from pgmb.describe_broker()"
    ).fetchone()
    assert row is not None
    return float(row[0])


def _overkept(admin: psycopg.Connection[Any], rotate_every: float) -> float:
    """For how long events are kept beyond retention and one rotation."""
    row = admin.execute(
        "select coalesce(extract(epoch from overkept_for), 0)::float8"
        " from pgmb.stream_health() where stream = 'main'"
    ).fetchone()
    assert row is not None
    return max(0.0, float(row[0]) - rotate_every)


def _overdue(admin: psycopg.Connection[Any]) -> float:
    """For how many seconds the schedule is due."""
    row = admin.execute("select extract(epoch from now - next_at)::float8 from pgmb.schedules()").fetchone()
    assert row is not None
    return float(row[0])


def _database_second(admin: psycopg.Connection[Any]) -> int:
    row = admin.execute("select floor(extract(epoch from clock_timestamp()))::bigint").fetchone()
    assert row is not None
    return int(row[0])


@contextlib.contextmanager
def _worker(dsn: str, log: Path) -> Iterator[int]:
    """`pgmb work`, started; its process id."""
    command = [sys.executable, "-m", "pgmb", "work", "faults.operations.upkeep_app:app", "--grace=0"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PGMB_DSN": dsn}, stdout=output, stderr=output
        )
    try:
        until_true(lambda: "this process leads" in log.read_text())
        yield worker.pid
    finally:
        # The second ends a handler that blocks.
        for _ in range(2):
            worker.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(3)
        try:
            worker.wait(30)
        finally:
            processes.send(worker.pid, signal.SIGKILL)
