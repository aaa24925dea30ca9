"""lake-archive: a log archived and verified, beside Spark reading the same log and writing plain Parquet."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave

if TYPE_CHECKING:
    from bench.spark.lab import Lab

EVENTS = {"tiny": 4_000, "brief": 500_000, "quick": 1_000_000, "full": 5_000_000}
ROUNDS = {"tiny": 1, "brief": 3, "quick": 4, "full": 4}
SEGMENTS = 4
SPARK, OURS = "Spark, Parquet", "pgmb lake"
CHECKS = ["archive vs Spark's own Parquet", "bytes in the lake vs in the log"]


def run(ground: Ground, form: Form) -> Outcome:
    from bench.spark.lab import BY_CPU, cpu_notes

    events = EVENTS[form.name]
    outcome = Outcome(
        "lake-archive",
        f"{events:,} events of 200 bytes in {SEGMENTS} segments, 2 executors of 1 core: written, committed,"
        " read back and recorded, beside Spark's read and Parquet writer",
    )
    with contextlib.closing(ground.site("pgmb, new log")) as site:
        logged = _fill(site, events)
        archive = _Archive(ground.lab, site, events)
        for name in (SPARK, OURS):
            archive.measure(name)  # warms up
        outcome.readings = interleave((SPARK, OURS), ROUNDS[form.name], archive.measure)
        stored = archive.stored
    outcome.checks = [
        outcome.compare(CHECKS[0], OURS, SPARK, 0.8, "per_second"),
        Check(CHECKS[1], stored / logged, 0.5, at_least=False),
    ]
    outcome.notes = [
        f"bytes per event: {stored / events:.0f} in the lake, {logged / events:.0f} in the log",
        *cpu_notes(outcome, SPARK),
        f"of Spark by CPU: {outcome.ratio(OURS, SPARK, BY_CPU):.2f}x",
    ]
    return outcome


def _fill(site: Site, events: int) -> int:
    """Sealed segments with these events; their bytes, with indexes."""
    from bench.spark.events import publish
    from harness.segments import seal

    per_segment = events // SEGMENTS
    for number in range(SEGMENTS):
        for begin in range(0, per_segment, 100_000):
            first = number * per_segment + begin + 1
            publish(site.connection, "main", first, min(first + 99_999, (number + 1) * per_segment))
        seal(site.connection)
    site.connection.execute("vacuum (freeze, analyze) pgmb.log_main")
    site.connection.execute("checkpoint")
    found = site.connection.execute(
        "select sum(pg_total_relation_size(format('pgmb.segment_%s_%s', stream, number)::regclass))"
        " from pgmb.segment where sealed_at is not null"
    ).fetchone()
    return int(found[0]) if found else 0


class _Archive:
    def __init__(self, lab: Lab, site: Site, events: int) -> None:
        self.lab, self.site, self.events = lab, site, events
        # By TCP, as executors on other machines would.
        self.url = site.server.url(site.database)
        self.stored = 0

    def measure(self, name: str) -> Reading:
        place = self.lab.folder()
        if name == OURS:
            self._forget(place)
        work = {SPARK: self._spark, OURS: self._ours}[name]
        reading = self.lab.measure(name, self.site.server, self.events, lambda: work(place))
        if name == OURS:
            self.stored = sum(file.stat().st_size for file in place.rglob("*.parquet"))
        shutil.rmtree(place)
        shutil.rmtree(f"{place}_dead", ignore_errors=True)
        return reading

    def _spark(self, place: Path) -> None:
        log = self.lab.spark.read.format("pgmb").option("url", self.url).option("tier", "log")
        log.load().write.parquet(str(place))

    def _ours(self, place: Path) -> None:
        from pgmb.lake.archive import Archiver
        from pgmb.lake.spark import SparkRun

        done = sum(one.events for one in Archiver(self.url, "main", SparkRun(self.lab.spark)).archive())
        if done != self.events:
            raise AssertionError(f"{done} of {self.events} events were archived")

    def _forget(self, place: Path) -> None:
        """As if nothing had been archived: another table, and digests to compute."""
        from pgmb.lake.archive import init

        self.site.connection.execute("delete from pgmb.archived")
        self.site.connection.execute("delete from pgmb.lake")
        self.site.connection.execute("update pgmb.segment set archived_at = null")
        init(self.url, "main", str(place))
