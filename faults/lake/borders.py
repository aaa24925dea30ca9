"""A query from the earliest event over lake and log, killed while archiving and retention move the border.

What was published is known from a table that publishers write in the same transactions. The query writes
Parquet by Spark's own sink; in the end its files hold each event once, and so does a batch over both tiers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from faults.spark import files
from faults.spark.console import Console
from faults.spark.kills import Killed
from harness.lake import Here, archived
from harness.segments import seal
from harness.spark import Cluster
from pgmb.lake.archive import Archiver, init

LEDGER = "create table published (seq bigint, n bigint)"
PUBLISH = """
with made as (
  insert into pgmb.log_main (topic, key, payload)
  select 'order.' || n %% 5, 'k' || n %% 9, n::text::json from generate_series(%s::bigint, %s::bigint) n
  returning seq, payload
)
insert into published select seq, payload::text::bigint from made
"""
DROPPED = "select count(*) from pgmb.segment where dropped_at is not null"


@dataclass(slots=True)
class Account:
    """What became of the events that were published."""

    events: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0

    @property
    def clean(self) -> bool:
        return self.events > 0 and not (self.lost or self.repeated or self.different)

    def __str__(self) -> str:
        return f"{self.events:,} events, {self.lost} lost, {self.repeated} repeated, {self.different} differ"


@dataclass(slots=True)
class Result:
    moves: int = 0
    kills: int = 0
    batches: int = 0
    in_lake: int = 0
    stream: Account = field(default_factory=Account)
    batch: Account = field(default_factory=Account)
    seconds: float = 0

    @property
    def holds(self) -> bool:
        return self.stream.clean and self.batch.clean and 0 < self.in_lake < self.batch.events

    def __str__(self) -> str:
        return (
            f"lake border {'holds' if self.holds else 'VIOLATED'}: {self.moves} moves, {self.kills} kills,"
            f" {self.batches} batches: {self.stream}; one batch over both tiers, {self.in_lake:,} of it from"
            f" the lake: {self.batch} in {self.seconds:.0f} s"
        )


def run(
    dsn: str, url: str, cluster: Cluster, folder: Path, *, events: int, moves: int, kills: int, seed: int
) -> Result:
    """Half of the events lie there when the query starts; the other half comes with the moves."""
    began = time.monotonic()
    result = Result()
    size = events // (2 * moves)
    read = {"url": dsn, "stream": "main", "startingOffsets": "earliest"}
    flow = {
        "name": "border",
        "checkpoint": str(folder / "checkpoint"),
        "read": {**read, "maxEventsPerTrigger": str(size * 2 // 3)},
        "parquet": str(folder / "events"),
    }
    queries = Killed(cluster, [flow], seed)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(LEDGER)
        init(dsn, "main", url)
        db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
        for number in range(moves):
            _publish(db, size)
            if number == moves // 2:
                _move(dsn, db)
        try:
            queries.start()
            for number in range(moves):
                _publish(db, size)
                result.moves += _move(dsn, db)
                if number * kills // moves < (number + 1) * kills // moves:
                    queries.wait_for_progress()
                    queries.close()
                    result.kills += 1
                    queries.start()
            queries.wait_for_progress()
            queries.drain()
        finally:
            queries.close()
        result.batches = files.committed(folder / "checkpoint")
        written = [path for _, paths in files.batches(folder / "events") for path in paths]
        result.stream = _account(db, written)

        # The last two segments stay in the log.
        _publish(db, size)
        _publish(db, size)
        with Console(cluster) as console:
            console.do("copy", read=read, folder=str(folder / "batch"))
        result.batch = _account(db, (folder / "batch").glob("*.parquet"))
        result.in_lake = _count(db, "select sum(events) from pgmb.archived")
    result.seconds = time.monotonic() - began
    return result


def _publish(db: psycopg.Connection[Any], events: int) -> None:
    first = _count(db, "select max(n) from published") + 1
    db.execute(PUBLISH, [first, first + events - 1])
    seal(db)


def _move(dsn: str, db: psycopg.Connection[Any]) -> bool:
    """Archive what is sealed and drop it from the log. Whether the border is another one."""
    before = _count(db, DROPPED)
    archived(Archiver(dsn, "main", Here()))
    db.execute("select pgmb.drop_segments()")
    return _count(db, DROPPED) > before


def _count(db: psycopg.Connection[Any], query: str) -> int:
    ((found,),) = db.execute(query.encode()).fetchall()
    return int(found or 0)


def _account(db: psycopg.Connection[Any], paths: Iterable[Path]) -> Account:
    with db.cursor() as cursor, cursor.copy("copy published to stdout") as copy:
        told = b"".join(bytes(part) for part in copy)
    truth = np.loadtxt(told.decode().splitlines(), dtype=np.int64, ndmin=2)
    found = np.concatenate([_read(path) for path in paths] or [np.empty((0, 2), np.int64)])
    lost = np.setdiff1d(truth[:, 0], found[:, 0])
    foreign = np.setdiff1d(found[:, 0], truth[:, 0])
    once, first = np.unique(found[:, 0], return_index=True)
    known = np.isin(once, truth[:, 0])
    expected = truth[np.argsort(truth[:, 0])]
    places = np.searchsorted(expected[:, 0], once[known])
    different = (expected[places, 1] != found[first[known], 1]).sum()
    return Account(len(truth), len(lost), len(found) - len(once) + len(foreign), int(different))


def _read(path: Path) -> NDArray[np.int64]:
    table = pq.ParquetFile(path).read(columns=["seq", "payload"])
    columns = (table.column(name).cast(pa.int64()).to_numpy() for name in ("seq", "payload"))
    return np.stack(list(columns), axis=1)
