"""Archivers killed after each step, with late commits, rotation, retention and a second archiver meanwhile.

What was published is known from a table that publishers write in the same transactions. In the end each event
is in the lake once, with the log's digest, and no segment was dropped that was not verified.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from deltalake import DeltaTable

from harness.lake import STEPS, Here, archived
from harness.spark import Driver
from pgmb.lake import digest
from pgmb.lake.archive import Archiver, init
from pgmb.lake.events import FILE_SCHEMA

LEDGER = "create table published (seq bigint)"
PUBLISH = """
with made as (
  insert into pgmb.log_main (topic, key, payload)
  select 'order.' || n %% 5, 'k' || n %% 9, json_build_object('n', n) from generate_series(1, %s::int) n
  returning seq
)
insert into published select seq from made
"""
SETTING = """
select pgmb.alter_stream('main', rotate_every => '500 ms', keep_for => '0 s')
"""


@dataclass(slots=True)
class Result:
    kills: Counter[str] = field(default_factory=Counter)
    on_spark: int = 0
    events: int = 0
    segments: int = 0
    dropped: int = 0
    lost: int = 0
    repeated: int = 0
    unverified: int = 0
    different: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def holds(self) -> bool:
        faults = self.lost or self.repeated or self.unverified or self.different or self.wrong
        return not faults and self.events > 0 and self.dropped > 0

    def __str__(self) -> str:
        return (
            f"lake kills {'hold' if self.holds else 'VIOLATED'}: {self.kills.total()} kills after"
            f" {len(self.kills)} steps, {self.on_spark} of them on Spark; {self.events:,} events in"
            f" {self.segments} segments, {self.dropped} dropped: {self.lost} lost, {self.repeated} repeated,"
            f" {self.different} digests differ, {self.unverified} dropped unverified in {self.seconds:.0f} s"
            + "".join(f"\n  WRONG {line}" for line in self.wrong)
        )


def run(
    dsn: str, url: str, *, times: int, spark: Sequence[str], seed: int, options: dict[str, str] | None = None
) -> Result:
    """Kill archivers after each step, `times` times, and after the steps of `spark` on Spark."""
    began = time.monotonic()
    result = Result()
    chance = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(LEDGER)
        init(dsn, "main", url, None, options)
        db.execute(SETTING)
        killed = [(step, False) for step in STEPS for _ in range(times)] + [(step, True) for step in spark]
        chance.shuffle(killed)
        with _going_on(dsn, chance, result.wrong):
            for number, (step, on_spark) in enumerate(killed):
                _wait_for_work(db, result.wrong)
                # Every third time another archiver works beside, without the lock that would keep it waiting.
                beside = contextlib.nullcontext() if number % 3 else _another(dsn, result.wrong)
                with beside:
                    _kill(dsn, step, on_spark, result)
                result.kills[step] += 1
                result.on_spark += on_spark
        archived(Archiver(dsn, "main", Here(), options=options))
        for _ in range(3):
            db.execute("select pgmb.rotate()")
            db.execute("select pgmb.maintain()")
        archived(Archiver(dsn, "main", Here(), options=options))
        _judge(db, DeltaTable(url, storage_options=options), result)
    result.seconds = time.monotonic() - began
    return result


def _kill(dsn: str, step: str, on_spark: bool, result: Result) -> None:
    arguments = [dsn, "main", "--die-after", step, "--commit-bytes", "1"]
    if on_spark:
        with Driver.start("harness.lake", *arguments, "--spark") as driver:
            code, said = driver.process.wait(180), driver.output()
    else:
        done = subprocess.run(
            [sys.executable, "-m", "harness.lake", *arguments], capture_output=True, text=True, check=False
        )
        code, said = done.returncode, done.stderr
    if code not in (0, -signal.SIGKILL):
        result.wrong.append(f"an archiver to be killed after {step} ended with {code}: {said[-500:]}")


@contextlib.contextmanager
def _another(dsn: str, wrong: list[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "harness.lake", dsn, "main", "--unlocked"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as other:
        yield
        _, said = other.communicate(timeout=300)
        if other.returncode != 0:
            wrong.append(f"the archiver beside ended with {other.returncode}: {said[-500:]}")


def _wait_for_work(db: psycopg.Connection[Any], wrong: list[str]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if len(db.execute("select from pgmb.plan_archive('main')").fetchall()) >= 2:
            return
        time.sleep(0.05)
    raise TimeoutError(f"no segment was sealed in a minute: {wrong}")


@contextlib.contextmanager
def _going_on(dsn: str, chance: random.Random, wrong: list[str]) -> Iterator[None]:
    """Publishers that commit late or not at all, and a janitor that rotates, seals and drops."""
    ended = threading.Event()

    def publish(seed: int) -> None:
        own = random.Random(seed)
        with psycopg.connect(dsn) as connection:
            while not ended.is_set():
                connection.execute(PUBLISH, [own.randint(1, 40)])
                ended.wait(own.random() * own.random())
                connection.rollback() if own.random() < 0.2 else connection.commit()

    def maintain(_seed: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not ended.wait(0.1):
                connection.execute("select pgmb.maintain()")

    def guarded(work: Callable[[int], None], seed: int) -> None:
        try:
            work(seed)
        except Exception as error:
            wrong.append(f"{work.__name__}: {error!r}")

    threads = [
        threading.Thread(target=guarded, args=(work, chance.random()))
        for work in (publish, publish, publish, maintain)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _judge(db: psycopg.Connection[Any], table: DeltaTable, result: Result) -> None:
    published = Counter(seq for (seq,) in db.execute("select seq from published"))
    stored = table.to_pyarrow_table(columns=FILE_SCHEMA.names).sort_by("seq")
    found = Counter(stored.column("seq").to_pylist())
    result.events = published.total()
    result.lost = (published - found).total()
    result.repeated = (found - published).total()
    (salt,) = db.execute("select salt from pgmb.stream where name = 'main'").fetchone() or (0,)
    blocks = digest.BlockDigests(salt)
    blocks.add(stored)
    held = digest.segments(blocks.blocks())
    for segment, events, wanted in db.execute("select segment, events, digest from pgmb.archived"):
        result.segments += 1
        result.different += held.get(segment, digest.EMPTY) != (events, bytes(wanted))
    rows = db.execute(
        "select count(*), count(*) filter (where not exists (select from pgmb.archived a"
        "  where a.stream = g.stream and a.segment = g.number and a.verified_at <= g.dropped_at))"
        " from pgmb.segment g where g.dropped_at is not null"
    ).fetchone()
    result.dropped, result.unverified = rows or (0, 0)
