"""Log to Spark to log to Spark under kills: the second stream holds each event once, each key in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from faults.log.history import Event
from faults.spark import files
from faults.spark.kills import Killed
from faults.spark.traffic import Account, Traffic, account
from harness.spark import Cluster


@dataclass(frozen=True, slots=True)
class Result:
    second: Account
    """The second stream, as its log holds it."""
    account: Account
    """What the last query made of the second stream."""
    disordered: int
    staged: int
    rolled_back: int
    driver_kills: int
    executor_kills: int
    tasks_lost: int
    restarts: int
    dropped: int
    seconds: float

    @property
    def holds(self) -> bool:
        clean = self.second.clean and self.account.clean and not (self.disordered or self.staged)
        return clean and bool(self.rolled_back and self.dropped)

    def __str__(self) -> str:
        return (
            f"spark republish {'holds' if self.holds else 'VIOLATED'}: "
            f"{self.account.committed:,} committed, {self.rolled_back:,} rolled back, "
            f"{self.driver_kills} driver kills, {self.executor_kills} executor kills: "
            f"second stream {self.second}; last sink {self.account}, {self.disordered:,} out of order | "
            f"{self.staged} stages left, {self.tasks_lost} tasks lost, {self.restarts} slow starts, "
            f"{self.dropped} segments dropped in {self.seconds:.0f} s"
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
    """Stream main into stream second by one query, second into Parquet by another, in one driver."""
    began = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_stream('second', rotate_every => '3 seconds')")
    read = {"url": dsn, "startingOffsets": "earliest", "maxEventsPerTrigger": str(per_trigger)}
    flows = [
        {
            "name": "republish",
            "checkpoint": str(folder / "checkpoint-1"),
            "read": {**read, "stream": "main", "readerName": "republish"},
            "write": {"url": dsn, "stream": "second"},
        },
        {
            "name": "store",
            "checkpoint": str(folder / "checkpoint-2"),
            "read": {**read, "stream": "second", "readerName": "store"},
            "parquet": str(folder / "events"),
        },
    ]
    queries = Killed(cluster, flows, seed)
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
    truth = traffic.truth()
    with psycopg.connect(dsn, autocommit=True) as connection:
        logged = [
            _name(payload)
            for (payload,) in connection.execute("select payload::text from pgmb.log_second order by seq")
        ]
        row = connection.execute("select count(*) from pgmb.stage where app is not null").fetchone()
        assert row is not None
    stored = sorted(
        (batch, seq, _name(payload))
        for batch, (seq, payload) in files.rows(folder / "events", "seq", "payload")
    )
    return Result(
        account(logged, truth),
        account((name for _, _, name in stored), truth),
        disordered(logged, truth) + disordered((name for _, _, name in stored), truth),
        row[0],
        traffic.rolled_back,
        queries.driver_kills,
        queries.executor_kills,
        queries.tasks_lost,
        queries.restarts,
        dropped,
        time.monotonic() - began,
    )


def _name(payload: str) -> int:
    """The name of the event that this one was made of."""
    return int(json.loads(payload)["payload"])


def disordered(names: Iterable[int], truth: dict[int, Event]) -> int:
    """How many came after a later one of their key."""
    newest: dict[str, int] = {}
    found = 0
    for name in names:
        event = truth.get(name)
        if event is None:
            continue
        found += event.order <= newest.get(event.key, -1)
        newest[event.key] = max(event.order, newest.get(event.key, -1))
    return found
