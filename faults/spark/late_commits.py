"""Late commits read by Spark, its driver and executors killed meanwhile: each committed event once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from faults.spark import files
from faults.spark.kills import Killed
from faults.spark.traffic import Account, Traffic, account
from harness.spark import Cluster


@dataclass(frozen=True, slots=True)
class Result:
    account: Account
    control: Account
    rolled_back: int
    driver_kills: int
    executor_kills: int
    tasks_lost: int
    restarts: int
    batches: int
    rotations: int
    dropped: int
    seconds: float

    @property
    def holds(self) -> bool:
        hard = self.rolled_back and self.rotations and self.dropped and self.control.lost
        return self.account.clean and bool(hard)

    def __str__(self) -> str:
        return (
            f"spark late commits {'hold' if self.holds else 'VIOLATED'}: "
            f"{self.account.committed:,} committed, {self.rolled_back:,} rolled back, "
            f"{self.driver_kills} driver kills, {self.executor_kills} executor kills: {self.account} | "
            f"{self.batches} batches, {self.tasks_lost} tasks lost, {self.restarts} slow starts, "
            f"{self.rotations} rotations, {self.dropped} segments dropped in {self.seconds:.0f} s | "
            f"control by max(seq): {self.control.lost:,} lost"
        )


def run(
    dsn: str,
    cluster: Cluster,
    folder: Path,
    *,
    writers: int,
    delay: float,
    size: int,
    rotate_every: float,
    drivers: int,
    executors: int,
    per_trigger: int,
    seed: int,
) -> Result:
    """A query of at most `per_trigger` events a batch into Parquet, while writers commit late."""
    began = time.monotonic()
    flow = {
        "name": "late",
        "checkpoint": str(folder / "checkpoint"),
        "read": {
            "url": dsn,
            "stream": "main",
            "startingOffsets": "earliest",
            "maxEventsPerTrigger": str(per_trigger),
            "readerName": "late",
        },
        "parquet": str(folder / "events"),
    }
    queries = Killed(cluster, [flow], seed)
    traffic = Traffic(
        dsn,
        files.Count(folder / "events"),
        writers=writers,
        delay=delay,
        size=size,
        rotate_every=rotate_every,
        seed=seed,
    )
    dropped = queries.withstand(traffic, drivers=drivers, executors=executors)
    names = (int(payload) for _, (payload,) in files.rows(folder / "events", "payload"))
    return Result(
        account(names, traffic.truth()),
        traffic.control(),
        traffic.rolled_back,
        queries.driver_kills,
        queries.executor_kills,
        queries.tasks_lost,
        queries.restarts,
        files.committed(folder / "checkpoint"),
        traffic.rotations,
        dropped,
        time.monotonic() - began,
    )
