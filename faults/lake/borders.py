"""A query from the earliest event over lake and log, killed while archiving and retention move the border.

Each transaction that publishes also records its events in a table. The query writes Parquet with Spark's own
sink. In the end its files hold each event once, and so does a batch that reads both tiers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from faults.spark import files
from faults.spark.console import Console
from faults.spark.kills import Killed
from faults.spark.traffic import Account, account
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
PUBLISHED = "select seq, n::text from published"
DROPPED = "select count(*) from pgmb.segment where dropped_at is not null"
_COLUMNS = ("seq", "payload")
_NOTHING = Account(0, 0, 0, 0)


@dataclass(slots=True)
class Result:
    moves: int = 0
    kills: int = 0
    batches: int = 0
    in_lake: int = 0
    stream: Account = _NOTHING
    batch: Account = _NOTHING
    seconds: float = 0

    @property
    def holds(self) -> bool:
        hard = self.moves > 0 and self.kills > 0 and 0 < self.in_lake < self.batch.committed
        return self.stream.clean and self.batch.clean and hard

    def __str__(self) -> str:
        return (
            f"lake border {'holds' if self.holds else 'VIOLATED'}: {self.moves} moves, {self.kills} kills,"
            f" {self.batches} batches, {self.stream.committed:,} events: {self.stream};"
            f" one batch over both tiers, {self.in_lake:,} of {self.batch.committed:,} events from the lake:"
            f" {self.batch} in {self.seconds:.0f} s"
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
        written = (row for _, row in files.rows(folder / "events", *_COLUMNS))
        result.stream = account(written, db.execute(PUBLISHED))

        # The last two segments stay in the log.
        _publish(db, size)
        _publish(db, size)
        with Console(cluster) as console:
            console.do("copy", read=read, folder=str(folder / "batch"))
        table = pq.read_table(folder / "batch", columns=list(_COLUMNS))
        rows = zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True)
        result.batch = account(rows, db.execute(PUBLISHED))
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
