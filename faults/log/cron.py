"""Schedulers in several processes while the server's clock runs ahead: each due time publishes once."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from faults.worker.kills import Fleet
from harness.clock import Clock

FINISHED_WITHIN = 60.0
"""Seconds after the last due time by which it must have been published."""


@dataclass(frozen=True, slots=True)
class Result:
    due_times: int
    published: Counter[str]
    processes: int
    kills: int
    publishers: int
    """How many processes published something."""
    races: int
    """How often a process found that another had been faster."""
    seconds: float

    @property
    def publishes(self) -> int:
        return self.published.total()

    @property
    def holds(self) -> bool:
        return self.publishes == self.due_times == len(self.published) and self.publishers > 1

    def __str__(self) -> str:
        repeated = sum(count > 1 for count in self.published.values())
        return (
            f"cron: {self.due_times} due times, {self.publishes} publishes, {self.processes} processes | "
            f"{'holds' if self.holds else 'VIOLATED'}: {repeated} due times repeated, {self.kills} kills, "
            f"{self.publishers} processes published, {self.races} races lost | {self.seconds:.1f} s"
        )


def schedule(dsn: str, number: int, journal: Path, stop: Path) -> None:
    """One process that runs a Scheduler, and nothing else."""
    logger = logging.getLogger("pgmb.services")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.FileHandler(journal))
    asyncio.run(_serve(dsn, number, stop))


async def _serve(dsn: str, number: int, stop: Path) -> None:
    from pgmb import aconnect
    from pgmb.services import Scheduler, serve

    told = asyncio.Event()
    async with await aconnect(dsn, application_name=f"scheduler {number}") as broker:
        await serve(broker, [Scheduler(every=0.05), _Foreman(stop, told)], told)


class _Foreman:
    """Ends the process's work once there is a file of that name."""

    name = "foreman"

    def __init__(self, stop: Path, told: asyncio.Event) -> None:
        self._stop = stop
        self._told = told

    async def turn(self, broker: object) -> float:
        if self._stop.exists():
            self._told.set()
        return 0.05


def run(
    dsn: str,
    clock: Clock,
    folder: Path,
    *,
    due_times: int,
    processes: int,
    kills: int,
    pace: float,
    seed: int,
) -> Result:
    """Crosses `due_times` of a schedule, at most 60, one in `pace` seconds."""
    chance = random.Random(seed)
    killing = {due_times * (nth + 1) // (kills + 1) for nth in range(kills)}
    began = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as connection:
        first = _stand_before_the_hour(connection, clock)
        # An expression with no more due times than these, however long the end of the run takes.
        cron = f"0-{due_times - 1} {first.hour} {first.day} {first.month} *"
        connection.execute(
            "select pgmb.create_schedule('every minute', %s, 'tick', '{}', %s, missed => 'all')",
            [cron, first],
        )
        fleet = Fleet(folder, schedule, dsn)
        try:
            for _ in range(processes):
                fleet.start()
            for number in range(due_times):
                # Through the minute in steps, so that the due time comes between looks as well as at them.
                for _ in range(4):
                    clock.set(clock.ahead + timedelta(seconds=15))
                    time.sleep(pace / 4)
                if number in killing:
                    _wait_for(connection, number // 2)
                    fleet.kill_one(chance)
                    fleet.start()
            _wait_for(connection, due_times)
            clock.set(clock.ahead + timedelta(hours=1))
            fleet.end()
        finally:
            fleet.abandon()
        published = Counter(
            due_at for (due_at,) in connection.execute("select headers ->> 'due_at' from pgmb.log_main")
        )
    lines = [journal.read_text() for journal in fleet.journals]
    return Result(
        due_times,
        published,
        processes,
        len(fleet.journals) - processes,
        sum("published" in text for text in lines),
        sum(text.count("faster") for text in lines),
        time.monotonic() - began,
    )


def _stand_before_the_hour(connection: psycopg.Connection[Any], clock: Clock) -> datetime:
    """Sets the clock to half a minute before the next hour, and returns the hour."""
    now = _now(connection)
    hour = (now + timedelta(hours=1)).replace(minute=0, second=0, microsecond=0)
    clock.set(clock.ahead + (hour - timedelta(seconds=30) - now))
    if not timedelta(0) < hour - _now(connection) <= timedelta(seconds=31):
        raise RuntimeError("the server's clock was not moved")
    return hour


def _now(connection: psycopg.Connection[Any]) -> datetime:
    row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    now: datetime = row[0]
    return now


def _wait_for(connection: psycopg.Connection[Any], publishes: int) -> None:
    """Until so many are published; or it takes too long, for the verdict to say."""
    deadline = time.monotonic() + FINISHED_WITHIN
    while time.monotonic() < deadline:
        row = connection.execute("select count(*) from pgmb.log_main").fetchone()
        if row is not None and row[0] >= publishes:
            return
        time.sleep(0.05)
