"""Requests while the workers that answer them are killed: each gets its own answer once, or a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

import pgmb

_LEASE_SECONDS = 2
_PATIENCE_SECONDS = 30.0
_ASKERS = 32
_MOST_RATIO = 2.0
"""Of the time to the answer to that to the handler, where nobody is killed."""

app = pgmb.App()
app.queue("double", lease_for=_LEASE_SECONDS, max_attempts=1000)


@app.answer("double", queue="double", concurrency=16)
async def double(event: pgmb.Delivery[int]) -> tuple[int, float, int]:
    return event.payload * 2, time.time(), event.attempt


@dataclass(frozen=True, slots=True)
class Result:
    requests: int
    kills: int
    landed: int
    """Requests that were in a worker's hands when it was killed: they were delivered again."""
    timeouts: int
    wrong: int
    doubled: int
    left_behind: bool
    """Whether the queue still held something, or had dead letters."""
    to_the_handler: float
    to_the_answer: float
    seconds: float

    @property
    def ratio(self) -> float:
        return self.to_the_answer / self.to_the_handler

    @property
    def holds(self) -> bool:
        exact = not (self.wrong or self.doubled or self.left_behind)
        return exact and (self.landed > 0 if self.kills else self.ratio <= _MOST_RATIO)

    def __str__(self) -> str:
        return (
            f"requests {'hold' if self.holds else 'VIOLATED'}: {self.requests} requests, {self.kills} kills, "
            f"{self.landed} delivered again: {self.wrong} wrong, {self.doubled} doubled, "
            f"{self.timeouts} timeouts, {'some' if self.left_behind else 'nothing'} left behind | "
            f"p50 {self.to_the_handler * 1000:.1f} ms to the handler, "
            f"{self.to_the_answer * 1000:.1f} ms to the answer ({self.ratio:.2f}x) | {self.seconds:.1f} s"
        )


class _Workers:
    """Two processes of `pgmb work`; a killed one is started again, and works before the next is killed."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self._environment = {**os.environ, "PGMB_DSN": dsn}
        self._folder = folder
        self._started = self.kills = 0
        self._running = [self._start() for _ in range(2)]

    def kill_one(self, chance: random.Random) -> None:
        place = chance.randrange(len(self._running))
        self._running[place].kill()
        self._running[place].wait()
        self.kills += 1
        self._running[place] = self._start()

    def stop(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            process.wait(30)

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        log = self._folder / str(self._started)
        command = [sys.executable, "-m", "pgmb", "work", f"{__name__}:app", "--no-services"]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, env=self._environment, stderr=errors)
        end = time.monotonic() + _PATIENCE_SECONDS
        while b"working on" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)
        return process


def run(dsn: str, *, requests: int, every: float | None, seed: int) -> Result:
    """The first 200 requests one by one, for their times; the others while workers are killed, if at all."""
    return asyncio.run(_run(dsn, requests, every, seed))


async def _run(dsn: str, requests: int, every: float | None, seed: int) -> Result:
    began = time.monotonic()
    with _working(dsn) as workers:
        async with _asking(dsn) as asker:
            await _ask(asker, 0)
            # One at a time: what others wait for would count as well.
            alone = [await _ask(asker, number) for number in range(200)]
            enough = asyncio.Event()
            killing = asyncio.create_task(_kill(workers, every, random.Random(seed), enough))
            answers = alone + await _ask_all(asker, range(200, requests))
            enough.set()
            await killing
            # What was in dead hands comes again first.
            settled = "select waiting + leases + retries + dead = 0 from pgmb.queue_status"
            nothing_left = await asyncio.to_thread(_until, dsn, settled)
    return Result(
        requests=len(answers),
        kills=workers.kills,
        landed=sum(answer is not None and answer.attempt > 1 for answer in answers),
        timeouts=sum(answer is None for answer in answers),
        wrong=sum(answer is not None and answer.wrong for answer in answers),
        doubled=_doubled(dsn),
        left_behind=not nothing_left,
        to_the_handler=statistics.median(answer.to_the_handler for answer in alone if answer),
        to_the_answer=statistics.median(answer.to_the_answer for answer in alone if answer),
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    wrong: bool
    attempt: int
    to_the_handler: float
    to_the_answer: float


async def _ask(asker: pgmb.App, number: int) -> _Answer | None:
    asked = time.time()
    try:
        got, handled, attempt = await asker.request("double", number, timeout=_PATIENCE_SECONDS)
    except TimeoutError:
        return None
    return _Answer(got != number * 2, attempt, handled - asked, time.time() - asked)


async def _ask_all(asker: pgmb.App, numbers: range) -> list[_Answer | None]:
    waiting, answers = iter(numbers), list[_Answer | None]()

    async def ask() -> None:
        for number in waiting:
            answers.append(await _ask(asker, number))

    await asyncio.gather(*(ask() for _ in range(_ASKERS)))
    return answers


async def _kill(workers: _Workers, every: float | None, chance: random.Random, enough: asyncio.Event) -> None:
    while every is not None and not enough.is_set():
        await asyncio.sleep(every * chance.uniform(0.5, 1.5))
        await asyncio.to_thread(workers.kill_one, chance)


@contextlib.contextmanager
def _working(dsn: str) -> Iterator[_Workers]:
    with tempfile.TemporaryDirectory() as folder:
        workers = _Workers(dsn, Path(folder))
        try:
            yield workers
        finally:
            workers.stop()


@contextlib.asynccontextmanager
async def _asking(dsn: str) -> AsyncIterator[pgmb.App]:
    asker = pgmb.App(dsn)
    try:
        yield asker
    finally:
        await asker.aclose()


def _until(dsn: str, statement: str) -> bool:
    """Wait for it to be true, for a while."""
    end = time.monotonic() + _PATIENCE_SECONDS
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(statement).fetchone() != (True,):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
    return True


def _doubled(dsn: str) -> int:
    """How many answers are in the log beside the first one to the same request."""
    with psycopg.connect(dsn) as connection:
        statement = "select count(*) - count(distinct payload ->> 'request') from pgmb.log_replies"
        (doubled,) = connection.execute(statement).fetchone() or (0,)
        return int(doubled)
