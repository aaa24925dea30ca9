"""A fair queue beside a tenant with a backlog: how long the other tenants wait, and what the turns cost.

One worker handles the events of many tenants, each of which publishes one event per second, in spans with
and without a backlog of one more tenant. Then it drains the same events, most of them of one tenant, from a
fair and from a plain queue, in turns.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

import pgmb

_MOST_DELAY = 3.0
"""Of the tenants' p99 beside the backlog to that without it."""
_LEAST_THROUGHPUT = 0.7
"""Of the fair queue's to the plain one's."""
_TENANTS = 50
_HANDLER_SECONDS = 0.002
_PATIENCE_SECONDS = 60.0
_RECORD = "PGMB_FAIR_RECORD"

app = pgmb.App()
app.queue("fair", fair_by="key")
app.queue("drained fairly", fair_by="key", stream="bulk")
app.queue("drained", stream="bulk")


@app.on("work", queue="fair", concurrency=10)
async def handle(event: pgmb.Delivery[float]) -> None:
    arrived = time.time()
    await asyncio.sleep(_HANDLER_SECONDS)
    if event.key != "noisy":
        _note(event.payload, arrived)


def _note(published: float, arrived: float) -> None:
    with Path(os.environ[_RECORD]).open("ab") as record:
        record.write(msgspec.json.encode((published, arrived)) + b"\n")


@app.on("work", queue="drained fairly", concurrency=10)
async def handle_fairly(event: pgmb.Delivery[float]) -> None:
    pass


@app.on("work", queue="drained", concurrency=10)
async def handle_in_order(event: pgmb.Delivery[float]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Result:
    quiet: list[float]
    """Seconds from publish to handler, of the tenants without a backlog beside them."""
    beside: list[float]
    """The same while one tenant's backlog waits."""
    left: int
    """Events of the backlog that waited at the end of the last span."""
    lost: int
    fair: float
    plain: float
    """Events per second."""
    seconds: float

    @property
    def delay(self) -> float:
        return _p99(self.beside) / _p99(self.quiet)

    @property
    def throughput(self) -> float:
        return self.fair / self.plain

    @property
    def holds(self) -> bool:
        return (
            self.delay <= _MOST_DELAY
            and self.throughput >= _LEAST_THROUGHPUT
            and not self.lost
            and self.left > 0
        )

    def __str__(self) -> str:
        quiet, beside = (
            (_p99(delays) * 1000, statistics.median(delays) * 1000) for delays in (self.quiet, self.beside)
        )
        events = len(self.quiet) + len(self.beside)
        return (
            f"fair {'holds' if self.holds else 'VIOLATED'}: {_TENANTS} tenants, p99 {quiet[0]:.0f} ms, "
            f"beside a backlog {beside[0]:.0f} ms ({self.delay:.2f}x; "
            f"p50 {quiet[1]:.0f} and {beside[1]:.0f} ms), "
            f"{events} events, {self.lost} lost, {self.left} of the backlog left | "
            f"throughput {self.fair:.0f}/s, plain {self.plain:.0f}/s ({self.throughput:.2f}x) | "
            f"{self.seconds:.1f} s"
        )


def run(dsn: str, *, backlog: int, seconds: float, rounds: int, seed: int) -> Result:
    """Spans of `seconds` without and with the backlog, `rounds` of each, one after another."""
    began = time.monotonic()
    quiet: list[float] = []
    beside: list[float] = []
    left = lost = 0
    with pgmb.connect(dsn) as broker, tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        with _running(dsn, record, Path(folder)):
            _tenants(broker, record, 2.0, seed)
            for number in range(rounds):
                delays, missing = _tenants(broker, record, seconds, seed + number)
                quiet += delays
                lost += missing
                _publish(broker, ["noisy"] * backlog, "main")
                delays, missing = _tenants(broker, record, seconds, seed + number)
                beside += delays
                lost += missing
                left = broker.queue_depth("fair") or 0
                broker.purge("fair")
            fair, plain = _drain(broker, backlog, seconds / 4, rounds, seed)
    return Result(quiet, beside, left, lost, fair, plain, time.monotonic() - began)


def _tenants(broker: pgmb.Broker, record: Path, seconds: float, seed: int) -> tuple[list[float], int]:
    """Publish an event of each tenant per second; their delays, and how many were never handled."""
    chance = random.Random(seed)
    begin = time.time()
    due = sorted(begin + second + chance.random() for second in range(int(seconds)) for _ in range(_TENANTS))
    for number, moment in enumerate(due):
        time.sleep(max(0.0, moment - time.time()))
        broker.publish("work", time.time(), key=f"tenant {number % _TENANTS}")
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        handled = [
            msgspec.json.decode(line, type=tuple[float, float]) for line in record.read_bytes().splitlines()
        ]
        delays = [arrived - published for published, arrived in handled if published >= begin]
        if len(delays) >= len(due) or time.monotonic() > end:
            return delays, len(due) - len(delays)
        time.sleep(0.05)


def _drain(broker: pgmb.Broker, backlog: int, seconds: float, rounds: int, seed: int) -> tuple[float, float]:
    """The throughput of a fair and of a plain queue over the same events, in turns."""
    chance = random.Random(seed)
    tenants = [
        "noisy" if chance.random() < 0.9 else f"tenant {chance.randrange(_TENANTS)}" for _ in range(backlog)
    ]
    queues = ("drained fairly", "drained")
    for queue in queues:
        broker.pause(queue)
    _publish(broker, tenants, "bulk")
    spent, taken = dict.fromkeys(queues, 0.0), dict.fromkeys(queues, 0)
    for _ in range(rounds + 1):
        for queue in queues:
            before, began = broker.queue_depth(queue) or 0, time.perf_counter()
            broker.resume(queue)
            time.sleep(seconds)
            broker.pause(queue)
            while next(one for one in broker.queue_status() if one.queue == queue).leases:
                time.sleep(0.005)
            spent[queue] += time.perf_counter() - began
            taken[queue] += before - (broker.queue_depth(queue) or 0)
    fair, plain = (taken[queue] / spent[queue] for queue in queues)
    return fair, plain


def _publish(broker: pgmb.Broker, tenants: list[str], stream: str) -> None:
    broker.publish_many((pgmb.NewEvent("work", 0.0, key=tenant) for tenant in tenants), stream=stream)


@contextmanager
def _running(dsn: str, record: Path, folder: Path) -> Iterator[None]:
    """A worker and the services."""
    environment = {**os.environ, "PGMB_DSN": dsn, _RECORD: str(record)}
    commands = {
        "worker": (["work", f"{__name__}:app", "--no-services"], b"working on"),
        "services": (["ticker"], b"ticker"),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, (command, ready) in commands.items():
            log = folder / name
            program = [sys.executable, "-m", "pgmb", *command]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(program, env=environment, stdout=output, stderr=output))
            end = time.monotonic() + _PATIENCE_SECONDS
            while ready not in log.read_bytes():
                if processes[-1].poll() is not None or time.monotonic() > end:
                    raise RuntimeError(log.read_text())
                time.sleep(0.02)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _p99(delays: list[float]) -> float:
    return sorted(delays)[int(len(delays) * 0.99)]
