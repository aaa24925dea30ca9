r"""spark-write: events from Parquet into a log by Spark, beside psql's \copy into one of the same kind."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import interleave

if TYPE_CHECKING:
    from bench.spark.lab import Lab

EVENTS = {"tiny": 4_000, "brief": 250_000, "quick": 500_000, "full": 2_000_000}
ROUNDS = {"tiny": 1, "brief": 2, "quick": 4, "full": 5}
PSQL, DIRECT, STAGED = "psql", "pgmb, direct", "pgmb"
CONTENDERS = (PSQL, DIRECT, STAGED)
CHECKS = ["Spark write, direct vs psql x2", "Spark write, exactly once vs psql x2"]


def run(ground: Ground, form: Form) -> Outcome:
    from bench.spark.lab import cpu_notes

    events = EVENTS[form.name]
    outcome = Outcome(
        "spark-write", f"{events:,} events from Parquet in 2 tasks, each time into a new stream"
    )
    with contextlib.closing(ground.site("pgmb, new log")) as site:
        writes = _Writes(ground.lab, site, events)
        for name in CONTENDERS:
            writes.measure(name)  # warms up
        outcome.readings = interleave(CONTENDERS, ROUNDS[form.name], writes.measure)
    outcome.checks = [
        outcome.compare(CHECKS[0], DIRECT, PSQL, 0.8, "per_second"),
        outcome.compare(CHECKS[1], STAGED, PSQL, 0.5, "per_second"),
    ]
    outcome.notes = cpu_notes(outcome, PSQL)
    return outcome


class _Writes:
    def __init__(self, lab: Lab, site: Site, events: int) -> None:
        self.lab, self.site, self.events = lab, site, events
        self.url = site.server.url(site.database)
        self._versions = itertools.count(1)
        self.texts, self.parquet = _files(lab, site, events)

    def measure(self, name: str) -> Reading:
        version = next(self._versions)
        stream = f"into_{version}"
        connection = self.site.connection
        connection.execute("select pgmb.create_stream(%s)", [stream])
        self.site.settle()
        work = {
            PSQL: lambda: self._psql(stream),
            DIRECT: lambda: self._spark(stream, version, "direct"),
            STAGED: lambda: self._spark(stream, version, "staged"),
        }[name]
        reading = self.lab.measure(name, self.site.server, self.events, work)
        row = connection.execute(f"select count(*) from pgmb.log_{stream}").fetchone()
        if row != (self.events,):
            raise AssertionError(f"{name} wrote {row}, not {self.events}")
        connection.execute("select pgmb.drop_stream(%s)", [stream])
        return reading

    def _psql(self, stream: str) -> None:
        from bench.spark.events import COLUMNS
        from bench.spark.psql import copy

        copy(self.url, [f"\\copy pgmb.log_{stream} ({COLUMNS}) from '{text}'" for text in self.texts])

    def _spark(self, stream: str, version: int, mode: str) -> None:
        writer = self.lab.spark.read.parquet(str(self.parquet)).write.format("pgmb").mode("append")
        writer = writer.option("url", self.url).option("stream", stream).option("commitMode", mode)
        writer.option("txnAppId", "bench").option("txnVersion", version).save()


def _files(lab: Lab, site: Site, events: int) -> tuple[list[Path], Path]:
    """The same events in two files as text for COPY, and in two of Parquet."""
    from pyarrow import parquet

    from bench.spark.events import select
    from bench.spark.psql import copy
    from bench.spark.reference import ranges

    parts = ranges(events, 2)
    folder = lab.folder()
    (folder / "parquet").mkdir(parents=True)
    texts = [folder / f"{number}.text" for number in range(2)]
    url = site.server.url(site.database)
    copy(
        url,
        [
            f"\\copy ({select(low + 1, high)}) to '{text}'"
            for (low, high), text in zip(parts, texts, strict=True)
        ],
    )
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        for number, (low, high) in enumerate(parts):
            cursor.execute(
                "select topic, key, payload::text payload "
                f"from ({select(low + 1, high)}) made (topic, key, payload)"
            )
            parquet.write_table(
                cursor.fetch_arrow_table(), folder / "parquet" / f"{number}.parquet", row_group_size=1_000_000
            )
    return texts, folder / "parquet"
