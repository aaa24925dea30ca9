r"""spark-read: the log read whole by Spark, beside psql's \copy and a bare ADBC source on the same table."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import interleave

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bench.spark.lab import Lab

EVENTS = {"tiny": 4_000, "brief": 500_000, "quick": 1_000_000, "full": 5_000_000}
ROUNDS = {"tiny": 1, "brief": 2, "quick": 4, "full": 4}
STREAM, FEW = "main", "few"
PSQL, ADBC, OURS = "psql", "adbc", "pgmb"
ADBC_PARQUET, OURS_PARQUET, STREAMED = "adbc, Parquet", "pgmb, Parquet", "pgmb, stream"
CONTENDERS = (PSQL, ADBC, OURS, STREAMED, ADBC_PARQUET, OURS_PARQUET)
CHECKS = ["Spark read vs ADBC", "Spark read vs psql x2", "Spark read to Parquet vs ADBC"]


def run(ground: Ground, form: Form) -> Outcome:
    from bench.spark.events import fill
    from bench.spark.lab import BY_CPU, cpu_notes

    events = EVENTS[form.name]
    outcome = Outcome(
        "spark-read", f"{events:,} events of 200 bytes, 2 executors of 1 core, to noop and Parquet"
    )
    with contextlib.closing(ground.site("pgmb, new log")) as site:
        site.connection.execute("select pgmb.create_stream(%s)", [FEW])
        for stream, size in ((FEW, 4_000), (STREAM, events)):
            fill(site.connection, stream, size)
        for name in CONTENDERS:
            _Reads(ground.lab, site, FEW, 4_000).measure(name)  # warms up
        reads = _Reads(ground.lab, site, STREAM, events)
        outcome.readings = interleave(CONTENDERS, ROUNDS[form.name], reads.measure)
    outcome.checks = [
        outcome.compare(CHECKS[0], OURS, ADBC, 0.9, "per_second"),
        outcome.compare(CHECKS[1], OURS, PSQL, 0.8, "per_second"),
        outcome.compare(CHECKS[2], OURS_PARQUET, ADBC_PARQUET, 0.9, "per_second"),
    ]
    outcome.notes = [
        f"streamed, availableNow: {outcome.ratio(STREAMED, ADBC, 'per_second'):.2f}x of ADBC",
        *cpu_notes(outcome, PSQL),
        f"of ADBC by CPU: to noop {outcome.ratio(OURS, ADBC, BY_CPU):.2f}x",
        f"of ADBC by CPU: to Parquet {outcome.ratio(OURS_PARQUET, ADBC_PARQUET, BY_CPU):.2f}x",
    ]
    return outcome


class _Reads:
    def __init__(self, lab: Lab, site: Site, stream: str, events: int) -> None:
        self.lab, self.site, self.stream, self.events = lab, site, stream, events
        # By TCP, as executors on other machines would.
        self.url = site.server.url(site.database)

    def measure(self, name: str) -> Reading:
        place = self.lab.folder()
        work = {
            PSQL: self._psql,
            ADBC: lambda: _noop(self._adbc()),
            OURS: lambda: _noop(self._ours()),
            STREAMED: self._streamed,
            ADBC_PARQUET: lambda: self._adbc().write.parquet(str(place)),
            OURS_PARQUET: lambda: self._ours().write.parquet(str(place)),
        }[name]
        reading = self.lab.measure(name, self.site.server, self.events, work)
        if place.exists():
            found = self.lab.spark.read.parquet(str(place)).count()
            if found != self.events:
                raise AssertionError(f"{name} read {found} of {self.events} events")
            shutil.rmtree(place)
        return reading

    def _psql(self) -> None:
        from bench.spark.psql import copy
        from bench.spark.reference import ranges, statement

        parts = ranges(self.events, 2)
        copy(self.url, [f"\\copy ({statement(self.stream, *part)}) to '/dev/null'" for part in parts])

    def _adbc(self) -> DataFrame:
        reader = self.lab.spark.read.format("reference").option("url", self.url).option("stream", self.stream)
        return reader.option("events", self.events).option("partitions", 2).load()

    def _ours(self) -> DataFrame:
        return self.lab.spark.read.format("pgmb").option("url", self.url).option("stream", self.stream).load()

    def _streamed(self) -> None:
        log = self.lab.spark.readStream.format("pgmb").option("url", self.url).option("stream", self.stream)
        writer = log.option("startingOffsets", "earliest").load().writeStream.format("noop")
        query = writer.trigger(availableNow=True).option("checkpointLocation", str(self.lab.folder())).start()
        query.awaitTermination()
        found = sum(progress["numInputRows"] for progress in query.recentProgress)
        if found != self.events:
            raise AssertionError(f"the stream gave {found} of {self.events} events")


def _noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()
