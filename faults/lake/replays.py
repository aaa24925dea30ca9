"""A replay of both tiers into one queue that is killed again and again.

What was published is known from a table that was written with it. In the end the queue has each event once,
with its id, key and time, another queue has nothing, and the replay has kept its rate while it ran.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from harness.lake import Here, archived
from harness.segments import seal
from harness.states import copy_retries, place, retries_waiting
from pgmb.lake.archive import Archiver, init
from pgmb.lake.replay import Replay, Replayer

SEGMENTS = 4
PUBLISH = """
with made as (
  insert into pgmb.log_main (topic, key, payload)
  select 'order.' || n %% 5, 'k' || n %% 9, json_build_object('n', n) from generate_series(1, %s::int) n
  returning seq, key, payload, published_at
)
insert into published select seq, key::text, payload::text, published_at from made
"""
DIFFERENT = """
select count(*) from published p full join received r on r.seq = p.seq
where (p.key, p.payload, p.published_at, pgmb.derive_id(p.seq, p.published_at, %s))
  is distinct from (r.key, r.payload, r.published_at, r.id)
"""


@dataclass(slots=True)
class Result:
    events: int = 0
    kills: int = 0
    dropped: int = 0
    rate: float = 0
    kept_rate: float = 0
    received: int = 0
    repeated: int = 0
    different: int = 0
    elsewhere: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def holds(self) -> bool:
        return (
            self.received == self.events > 0
            and not (self.repeated or self.different or self.elsewhere or self.wrong)
            and self.dropped > 0
            and abs(self.kept_rate / self.rate - 1) <= 0.1
        )

    def __str__(self) -> str:
        return (
            f"lake replay {'holds' if self.holds else 'VIOLATED'}: {self.events:,} events,"
            f" {self.kills} kills, {self.dropped} segments in the lake alone:"
            f" {self.events - self.received + self.repeated} lost,"
            f" {self.repeated} repeated, {self.different} differ, {self.elsewhere} in another queue;"
            f" {self.kept_rate:,.0f} of {self.rate:,.0f} events per second in {self.seconds:.0f} s"
            + "".join(f"\n  WRONG {line}" for line in self.wrong)
        )


def run(dsn: str, url: str, *, events: int, kills: int, rate: float, seed: int) -> Result:
    began = time.monotonic()
    result = Result(events=events, rate=rate)
    chance = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as db:
        _fill(db, dsn, url, events)
        for name in ("target", "other"):
            db.execute("select pgmb.create_queue(%s, '{#}')", [name])
        before = _other(db)
        replayer = Replayer(dsn)
        id = replayer.start(replayer.choose("main", None, None, into_queue="target"))
        after = sorted(chance.sample(range(events // 20, events - events // 20), kills))
        samples = [_run(replayer, id, place, rate, result) for place in [*after, events]]
        spans = [(ran[-1][0] - ran[0][0], (ran[-1][1] - ran[0][1]).total_seconds()) for ran in samples if ran]
        result.kept_rate = sum(sent for sent, _ in spans) / max(sum(spent for _, spent in spans), 0.001)
        result.kills = kills
        _judge(db, result)
        result.elsewhere += _other(db) != before
        if replayer.find(id).ended_at is None:
            result.wrong.append("the replay has not ended")
    result.seconds = time.monotonic() - began
    return result


def _fill(db: psycopg.Connection[Any], dsn: str, url: str, events: int) -> None:
    """Segments of which two are in the lake alone, one in both tiers, and one, open, in the log."""
    db.execute("create table published (seq bigint, key text, payload text, published_at timestamptz)")
    init(dsn, "main", url, "1 hour")
    for number in range(SEGMENTS):
        db.execute(PUBLISH, [events // SEGMENTS])
        if number < SEGMENTS - 1:
            seal(db)
        if number == SEGMENTS - 3:
            archived(Archiver(dsn, "main", Here()))
            db.execute("update pgmb.segment set closed_at = closed_at - interval '1 day',"
                       " last_published_at = last_published_at - interval '1 day'")  # fmt: skip
            db.execute("select pgmb.drop_segments()")
    archived(Archiver(dsn, "main", Here()))


def _run(replayer: Replayer, id: UUID, upto: int, rate: float, result: Result) -> list[tuple[int, datetime]]:
    """Run until so many events are sent and kill it, or until it ends: how many were sent, and when."""
    command = [sys.executable, "-m", "pgmb", "lake", "replay", "--dsn", replayer.dsn, "--resume", str(id)]
    seen: list[tuple[int, datetime]] = []
    last = replayer.find(id).events
    with subprocess.Popen([*command, "--rate", f"{rate}/s"], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as running:  # fmt: skip
        end = time.monotonic() + 120 + result.events / rate
        while running.poll() is None:
            found: Replay = replayer.find(id)
            if found.events != last and found.moved_at is not None:
                last = found.events
                seen.append((found.events, found.moved_at))
            if found.events >= upto < result.events:
                running.kill()
                break
            if time.monotonic() > end:
                running.kill()
                raise TimeoutError(f"the replay stands at {found.events} of {result.events} events")
            time.sleep(0.02)
        _, said = running.communicate()
        if running.returncode not in (0, -signal.SIGKILL):
            result.wrong.append(f"the replay ended with {running.returncode}: {said[-500:]}")
    return seen


def _other(db: psycopg.Connection[Any]) -> Any:
    """What another queue has, and where it stands."""
    before = retries_waiting(db, "other"), place(db, "other")
    return *before, db.execute("select count(*) from pgmb.receive('other')").fetchone()


def _judge(db: psycopg.Connection[Any], result: Result) -> None:
    (salt,) = db.execute("select salt from pgmb.stream where name = 'main'").fetchone() or (0,)
    copy_retries(db, "target", "received")
    rows = db.execute("select count(*), count(*) - count(distinct id) from received").fetchone()
    result.received, result.repeated = rows or (0, 0)
    (result.different,) = db.execute(DIFFERENT, [salt]).fetchone() or (0,)
    result.elsewhere = retries_waiting(db) - retries_waiting(db, "target")
    (result.dropped,) = db.execute(
        "select count(*) from pgmb.segment where dropped_at is not null"
    ).fetchone() or (0,)
