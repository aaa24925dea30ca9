"""Keys erased from log and lake, by a command that is killed again and again, while readers go on.

Fifty keys among many events, in segments that only the lake has, that both have, and that only the log has.
A tail and a streaming query read from the beginning and go on meanwhile, and a publisher adds events of other
keys. In the end the values are in no file of the database and the lake, every other event is as it was, and
both readers have each event once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

import pgmb
from harness.lake import Here, archived
from harness.segments import seal
from harness.spark import session
from harness.traces import in_database, in_lake
from pgmb.erasure import Eraser
from pgmb.lake.archive import Archiver, init
from pgmb.lake.care import Keeper

MARK = "zq7erased"
"""In each key, payload and header that is to be erased, and nowhere else."""
KEYS = [f"{MARK}-{number}" for number in range(50)]
SEGMENTS = 4
EVERY = 100
"""One event of so many has one of the keys."""
PUBLISH = """
insert into pgmb.log_main (topic, key, payload, headers)
select 'order.' || n %% 5, case when chosen then %s::text || '-' || n / %s %% 50 else 'k' || n %% 1000 end,
  json_build_object('n', n, 'name', case when chosen then %s::text else md5(n::text) end,
    'text', repeat('x', n %% 200)),
  case when chosen then json_build_object('name', %s::text) end
from (select n, n %% %s = 0 chosen from generate_series(%s::int, %s::int) n) one
"""


@dataclass(slots=True)
class Result:
    events: int = 0
    erased: int = 0
    kills: int = 0
    found: dict[str, list[str]] = field(default_factory=dict)
    different: int = 0
    damaged: int = 0
    tailed: int = 0
    streamed: int = 0
    wrong: list[str] = field(default_factory=list)
    erasing: float = 0
    seconds: float = 0

    @property
    def holds(self) -> bool:
        return (
            self.erased * EVERY == self.events > 0
            and not (self.found or self.different or self.damaged or self.wrong)
            and not (self.tailed or self.streamed)
        )

    def __str__(self) -> str:
        return (
            f"lake erase {'holds' if self.holds else 'VIOLATED'}: {len(KEYS)} keys of {self.erased:,} among"
            f" {self.events:,} events, {self.kills} kills: found in {len(self.found)} files,"
            f" {self.different} other events changed, {self.damaged} segments damaged;"
            f" the tail missed or repeated {self.tailed}, the streaming query {self.streamed};"
            f" the last run took {self.erasing:.1f} s, all {self.seconds:.0f} s"
            + "".join(f"\n  FOUND {name}: {held}" for name, held in self.found.items())
            + "".join(f"\n  WRONG {line}" for line in self.wrong)
        )


def run(dsn: str, folder: Path, *, events: int, steps: Sequence[str]) -> Result:
    began = time.monotonic()
    result = Result(events=events)
    (folder / "spark").mkdir()
    with psycopg.connect(dsn, autocommit=True) as db, session(folder / "spark") as spark:
        _fill(db, dsn, str(folder / "main"), events)
        before, result.erased = _events(dsn)
        with _readers(dsn, spark, folder, result) as readers, _published(dsn):
            for step in steps:
                _kill(dsn, step, result)
            started = time.monotonic()
            done = Eraser(dsn, KEYS).erase("a run of faults")
            result.erasing = time.monotonic() - started
            readers.wait_for(dsn)
        erased = {table.name: table.events for table in done.tables}
        if erased.get(str(folder / "main")) != result.erased * (SEGMENTS - 1) // SEGMENTS:
            result.wrong.append(f"the record says {erased}")
        result.found = in_database(db, [MARK]) | in_lake([folder / "main", folder / "main_dead"], [MARK])
        after, tombstones = _events(dsn, done.id)
        result.different = sum(after.get(seq) != event for seq, event in before.items())
        if tombstones != result.erased:
            result.wrong.append(f"{tombstones} tombstones")
        checked = Keeper(dsn, "main").verify()
        result.damaged = len(checked.damaged)
        readers.judge(after, result)
    result.seconds = time.monotonic() - began
    return result


def _fill(db: psycopg.Connection[Any], dsn: str, url: str, events: int) -> None:
    """Segments of which two are in the lake alone, one in both tiers, and one, open, in the log."""
    init(dsn, "main", url, "1 hour")
    size = events // SEGMENTS
    for number in range(SEGMENTS):
        first = number * size + 1
        if number == SEGMENTS - 1:
            db.execute("select pgmb.create_queue('q', '{order.0}')")
        db.execute(PUBLISH.encode(), [MARK, EVERY, MARK, MARK, EVERY, first, first + size - 1])
        if number < SEGMENTS - 1:
            seal(db)
        if number == SEGMENTS - 3:
            archived(Archiver(dsn, "main", Here()))
            db.execute("update pgmb.segment set closed_at = closed_at - interval '1 day',"
                       " last_published_at = last_published_at - interval '1 day'")  # fmt: skip
            db.execute("select pgmb.drop_segments()")
    archived(Archiver(dsn, "main", Here()))
    with pgmb.connect(dsn, max_size=1) as broker:
        lease = broker.receive("q", 1000)
        chosen = [event.seq for event in lease.events if event.key in KEYS]
        lease.retry(chosen[::2], 3600, f"failed for {MARK}")
        lease.bury(chosen[1::2], f"failed for {MARK}")


def _events(dsn: str, erasure: object = None) -> tuple[dict[int, int], int]:
    """A hash of each event of log and lake by its number, as after an erasure; and how many have keys."""
    found: dict[int, int] = {}
    keyed = 0
    mark = f'{{"pgmb-erased":"{erasure}"}}'.encode()
    with pgmb.connect(dsn, max_size=1) as broker:
        for event in broker.tail("#", after=broker.earliest(), follow=False):
            rest: tuple[Any, ...] = (event.key, event.raw, event.raw_headers)
            if event.key in KEYS or rest == (None, b"null", mark):
                rest, keyed = (None, b"null", "erased"), keyed + 1
            found[event.seq] = hash((event.id, event.topic, event.published_at, rest))
    return found, keyed


def _kill(dsn: str, step: str, result: Result) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.erase", dsn, "--die-after", step, *KEYS],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != -signal.SIGKILL:
        result.wrong.append(f"the erasure to be killed after {step} ended: {done.stderr[-500:]}")
    result.kills += 1
    with psycopg.connect(dsn, autocommit=True) as db:
        # Its session holds the locks for a moment longer.
        while db.execute("select from pg_stat_activity where application_name = 'pgmb erase'").fetchone():
            time.sleep(0.01)


@contextmanager
def _published(dsn: str) -> Iterator[None]:
    """Publish events of other keys, meanwhile."""
    stop = threading.Event()

    def publish() -> None:
        with pgmb.connect(dsn, max_size=1) as broker:
            while not stop.wait(0.1):
                broker.publish("order.new", {"n": 0}, key="new")

    running = threading.Thread(target=publish)
    running.start()
    try:
        yield
    finally:
        stop.set()
        running.join()


class _Readers:
    """What a tail and a streaming query have read."""

    def __init__(self) -> None:
        self.tailed: list[int] = []
        self.streamed: list[int] = []
        self.errors: list[str] = []

    def wait_for(self, dsn: str) -> None:
        """Until both have read what is published now."""
        with pgmb.connect(dsn, max_size=1) as broker:
            broker.publish("order.last", {}, key="last")
        with psycopg.connect(dsn) as db:
            (last,) = db.execute("select max(seq) from pgmb.log_main").fetchone() or (0,)
        deadline = time.monotonic() + 120
        while not (last in self.tailed[-1000:] and last in self.streamed[-1000:]):
            if self.errors or time.monotonic() > deadline:
                self.errors.append(f"readers do not come to event {last}")
                return
            time.sleep(0.05)

    def judge(self, events: dict[int, Any], result: Result) -> None:
        result.wrong += self.errors
        upto = max(self.tailed, default=0), max(self.streamed, default=0)
        for name, seen, last in (("tailed", self.tailed, upto[0]), ("streamed", self.streamed, upto[1])):
            counts = Counter(seen)
            wrong = sum(counts[seq] != 1 for seq in events if seq <= last) + len(
                counts.keys() - events.keys()
            )
            setattr(result, name, wrong)


@contextmanager
def _readers(dsn: str, spark: Any, folder: Path, result: Result) -> Iterator[_Readers]:
    readers = _Readers()
    stop = threading.Event()

    def tail() -> None:
        try:
            with pgmb.connect(dsn, max_size=2) as broker:
                for event in broker.tail("#", after=broker.earliest()):
                    readers.tailed.append(event.seq)
                    if len(readers.tailed) < result.events // 2:
                        # Slow at first: files are removed while it reads.
                        time.sleep(0.00005)
                    if stop.is_set():
                        return
        except Exception as error:
            readers.errors.append(f"tail: {error!r}")

    def keep(batch: Any, _: int) -> None:
        readers.streamed.extend(row.seq for row in batch.select("seq").collect())

    reading = spark.readStream.format("pgmb").options(
        url=dsn, startingOffsets="earliest", maxEventsPerTrigger=str(result.events // 10)
    )
    query = (
        reading.load()
        .writeStream.foreachBatch(keep)
        .trigger(processingTime="1 second")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    running = threading.Thread(target=tail, daemon=True)
    running.start()
    try:
        yield readers
    finally:
        if query.exception() is not None:
            readers.errors.append(f"streaming query: {query.exception()}")
        query.stop()
        stop.set()
        with pgmb.connect(dsn, max_size=1) as broker:
            # The tail looks up when an event comes.
            broker.publish("order.end", {}, key="end")
        running.join(30)
