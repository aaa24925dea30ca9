"""lake-growth: the cost of archiving a segment, by the size of the table that it is added to."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import interleave

if TYPE_CHECKING:
    from bench.spark.lab import Lab

BEFORE = {
    "tiny": (2_000, 4_000),
    "brief": (25_000, 500_000),
    "quick": (200_000, 4_000_000),
    "full": (1_000_000, 20_000_000),
}
SEGMENT = {"tiny": 1_000, "brief": 25_000, "quick": 100_000, "full": 200_000}
ROUNDS = {"tiny": 1, "brief": 9, "quick": 9, "full": 15}
CHECKS = ["archive of a segment, 20x the lake, CPU", "archive of a segment, 20x the lake, time"]


def run(ground: Ground, form: Form) -> Outcome:
    from bench.spark.lab import BY_CPU

    segment = SEGMENT[form.name]
    outcome = Outcome("lake-growth", f"segments of {segment:,} events, by what the lake held before")
    names = [f"{size:,} before" for size in BEFORE[form.name]]
    with contextlib.closing(ground.site("pgmb, new log")) as site:
        growing = {
            name: _Growing(ground.lab, site, name, size, segment)
            for name, size in zip(names, BEFORE[form.name], strict=True)
        }
        outcome.readings = interleave(names, ROUNDS[form.name], lambda name: growing[name].measure())
    goal = 1.2 if form.name != "tiny" else 100
    few, many = names
    # Rates: the first over the second is the cost of the second over the first.
    outcome.checks = [
        outcome.compare(CHECKS[0], few, many, goal, BY_CPU, at_least=False),
        outcome.compare(CHECKS[1], few, many, goal, "per_second", at_least=False),
    ]
    outcome.notes = [f"{name}: {outcome.middle(name, 'wall'):.2f} s a segment" for name in names]
    return outcome


class _Growing:
    """A stream that is archived with one commit per segment."""

    def __init__(self, lab: Lab, site: Site, name: str, size: int, segment: int) -> None:
        from pgmb.lake.archive import init

        self.lab, self.site, self.name, self.segment = lab, site, name, segment
        self.stream, self.end = f"of_{size}", 0
        # By TCP, as executors on other machines would.
        self.url = site.server.url(site.database)
        site.connection.execute("select pgmb.create_stream(%s)", [self.stream])
        init(self.url, self.stream, str(lab.folder()))
        while self.end < size:
            self._publish()
            self._archive()

    def measure(self) -> Reading:
        self._publish()
        return self.lab.measure(self.name, self.site.server, self.segment, self._archive)

    def _publish(self) -> None:
        """Publish one more segment, seal and vacuum it."""
        from bench.spark.events import publish
        from harness.segments import seal

        for begin in range(self.end, self.end + self.segment, 100_000):
            publish(
                self.site.connection,
                self.stream,
                begin + 1,
                min(begin + 100_000, self.end + self.segment),
            )
        self.end += self.segment
        number = seal(self.site.connection, self.stream)
        self.site.connection.execute(
            f"vacuum (freeze, analyze) pgmb.segment_{self._stream_id()}_{number}".encode()
        )

    def _archive(self) -> None:
        from pgmb.lake.archive import Archiver
        from pgmb.lake.spark import SparkRun

        archiver = Archiver(self.url, self.stream, SparkRun(self.lab.spark))
        done = sum(one.events for one in archiver.archive())
        if done != self.segment:
            raise AssertionError(f"{done} of {self.segment} events were archived")

    def _stream_id(self) -> int:
        row = self.site.connection.execute(
            "select id from pgmb.stream where name = %s", [self.stream]
        ).fetchone()
        assert row is not None
        return int(row[0])
