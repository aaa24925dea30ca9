"""A projection whose driver is killed again and again, at named steps and at any moment, while events are
published late, do not fit, are erased, and the lake's files are joined.

In the end the table has what DuckDB makes of the lake's events with functions of its own: each event once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psycopg
from deltalake import DeltaTable

from harness.lake import PROJECTION_STEPS, Here, MortalProjector, archived
from harness.projections import ORDERS, Rows, erase, expected_and_held, publish
from harness.segments import seal
from harness.spark import Driver
from pgmb.lake.archive import Archiver, init
from pgmb.lake.care import Keeper
from pgmb.lake.projection.columns import parse_columns
from pgmb.lake.projection.table import declare

RANDOM = "at random"


@dataclass(slots=True)
class Result:
    kills: Counter[str] = field(default_factory=Counter)
    on_spark: int = 0
    events: int = 0
    late: int = 0
    rows: int = 0
    rescued: int = 0
    erased: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def holds(self) -> bool:
        faults = self.lost or self.repeated or self.different or self.wrong
        return not faults and min(self.rows, self.rescued, self.erased, self.late, self.kills.total()) > 0

    def __str__(self) -> str:
        return (
            f"lake projections {'hold' if self.holds else 'VIOLATED'}: {self.kills.total()} kills at"
            f" {len(self.kills)} steps, {self.on_spark} of them on Spark; {self.events:,} events,"
            f" {self.late:,} committed late, {self.erased:,} erased; {self.rows:,} rows,"
            f" {self.rescued:,} rescued: {self.lost} lost, {self.repeated} repeated, {self.different} differ"
            f" from DuckDB's, in {self.seconds:.0f} s" + "".join(f"\n  WRONG {line}" for line in self.wrong)
        )


def run(dsn: str, url: str, *, events: int, steps: Sequence[str], spark: Sequence[str], seed: int) -> Result:
    """Kill a projector at each of `steps`, and at those of `spark` on Spark; before each, publish events."""
    began = time.monotonic()
    result = Result()
    chance = random.Random(seed)
    killed = [(step, False) for step in steps] + [(step, True) for step in spark]
    chance.shuffle(killed)
    with psycopg.connect(dsn, autocommit=True) as db:
        init(dsn, "main", url, "1 hour")
        table = declare(dsn, ORDERS)
        for number, (step, on_spark) in enumerate(killed):
            _publish(dsn, db, chance, events, result)
            archived(Archiver(dsn, "main", Here()))
            if number % 4 == 1:
                Keeper(dsn, "main").compact(1 << 24)
            if number % 3 == 2:
                result.erased += erase(url, f"k{chance.randrange(9)}")
            if number == len(killed) // 2:
                # Another declaration and back: the table is rebuilt in one commit.
                declare(dsn, msgspec.structs.replace(ORDERS, columns=parse_columns("n int")), replace=True)
                declare(dsn, ORDERS, replace=True)
                _kill(dsn, "write", False, chance, result, "--rebuild")
                list(MortalProjector(dsn, "orders", Here()).run(rebuild=True))
            _kill(dsn, step, on_spark, chance, result)
        list(MortalProjector(dsn, "orders", Here()).run())
        _judge(*expected_and_held(url, table), result)
        list(MortalProjector(dsn, "orders", Here()).run(rebuild=True))
        wanted, found = expected_and_held(url, table)
        if wanted != found:
            result.wrong.append("a backfill gives other rows")
        if DeltaTable(table).to_pyarrow_table().num_rows != result.rows:
            result.wrong.append("the table's own count is another")
    result.seconds = time.monotonic() - began
    return result


def _publish(
    dsn: str, db: psycopg.Connection[Any], chance: random.Random, events: int, result: Result
) -> None:
    """Publish events, of which a part is committed after the segment was closed."""
    late = events // 10
    with psycopg.connect(dsn) as slow:
        publish(slow, chance, late, base=result.events)
        publish(db, chance, events - late, base=result.events + late)
        db.execute("select pgmb.rotate('main')")
        publish(db, chance, late, base=result.events + events)
        slow.commit()
    seal(db)
    result.events += events + late
    result.late += late


def _kill(dsn: str, step: str, on_spark: bool, chance: random.Random, result: Result, *more: str) -> None:
    named = [] if step == RANDOM else ["--die-after", step]
    arguments = [dsn, "main", "--project", "orders", "--commit-bytes", "1", *named, *more]
    if on_spark:
        with Driver.start("harness.lake", *arguments, "--spark") as driver:
            code, said = driver.process.wait(180), driver.output()
    else:
        with subprocess.Popen(
            [sys.executable, "-m", "harness.lake", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as running:  # fmt: skip
            if step == RANDOM:
                # After its first commit, of several, or a moment later.
                reader = threading.Thread(target=running.stdout.readline if running.stdout else print)
                reader.start()
                reader.join(60)
                time.sleep(chance.random() * 0.2)
                running.kill()
            _, said = running.communicate()
            code = running.returncode
    if code not in (0, -signal.SIGKILL):
        result.wrong.append(f"a projector to be killed after {step} ended with {code}: {said[-500:]}")
    result.kills[step] += 1
    result.on_spark += on_spark


def _judge(wanted: Rows, found: Rows, result: Result) -> None:
    by_seq = {row[0]: row for row in wanted}
    counts = Counter(row[0] for row in found)
    result.rows = len(wanted)
    result.rescued = sum(row[12] for row in wanted)
    result.lost = len(by_seq.keys() - counts.keys())
    result.repeated = counts.total() - len(counts) + len(counts.keys() - by_seq.keys())
    different = [row for row in found if row[0] in by_seq and row != by_seq[row[0]]]
    result.different = len(different)
    result.wrong += [f"{row} instead of {by_seq[row[0]]}" for row in different[:3]]


STEPS = (*PROJECTION_STEPS, RANDOM, RANDOM, RANDOM)
