"""spark-growth: a streaming query's batch of new events costs the same however many lie before it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import interleave

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from bench.spark.lab import Lab

SIZES = {
    "tiny": (1_000, 2_000, 4_000),
    "brief": (25_000, 125_000, 500_000),
    "quick": (200_000, 1_000_000, 4_000_000),
    "full": (1_000_000, 5_000_000, 20_000_000),
}
NEW = {"tiny": 1_000, "brief": 20_000, "quick": 50_000, "full": 100_000}
ROUNDS = {"tiny": 1, "brief": 5, "quick": 9, "full": 15}
CHECKS = ["Spark batch time, 5x the log", "Spark batch time, 20x the log"]
_PATIENCE = 300.0


def run(ground: Ground, form: Form) -> Outcome:
    new, sizes = NEW[form.name], SIZES[form.name]
    outcome = Outcome("spark-growth", f"batches of {new:,} new events, seconds, by what the log held before")
    names = [f"{size:,} before" for size in sizes]
    with contextlib.closing(ground.site("pgmb, new log")) as site, contextlib.ExitStack() as stack:
        growing: dict[str, _Growing] = {}
        for name, size in zip(names, sizes, strict=True):
            growing[name] = _Growing(ground.lab, site, name, size, new)
            stack.callback(growing[name].stop)
        for name in names:
            growing[name].measure()  # warms up
        outcome.readings = interleave(names, ROUNDS[form.name], lambda name: growing[name].measure())
    goal = 1.2 if form.name != "tiny" else 100
    outcome.checks = [
        outcome.compare(check, other, names[0], goal, "seconds", at_least=False)
        for check, other in zip(CHECKS, names[1:], strict=True)
    ]
    outcome.notes = [f"{name}: {outcome.middle(name, 'seconds'):.2f} s a batch" for name in names]
    return outcome


class _Growing:
    """A stream with events in it, and a query that waits for more."""

    def __init__(self, lab: Lab, site: Site, name: str, size: int, new: int) -> None:
        from bench.spark.events import fill

        self.name, self.site, self.lab, self.new = name, site, lab, new
        self.stream, self.end = f"of_{size}", size
        site.connection.execute("select pgmb.create_stream(%s)", [self.stream])
        fill(site.connection, self.stream, size)
        log = lab.spark.readStream.format("pgmb").option("url", site.server.url(site.database))
        log = log.option("stream", self.stream).option("startingOffsets", "latest")
        writer = log.load().writeStream.format("noop").option("checkpointLocation", str(lab.folder()))
        self.query: StreamingQuery = writer.start()
        # Its place is taken before the first trigger is over.
        self._until(lambda: self.query.lastProgress)

    def measure(self) -> Reading:
        """Publishes the new events in one transaction: the time of the batch that reads them."""
        from bench.spark.events import publish

        before = cpu.of_server(self.site.server.postmaster_pid)
        publish(self.site.connection, self.stream, self.end + 1, self.end + self.new)
        server = cpu.of_server(self.site.server.postmaster_pid)
        clients = self.lab.cpu_seconds()
        self.end += self.new
        progress = self._until(self._batch)
        seconds = progress["durationMs"]["triggerExecution"] / 1000
        server_cpu = cpu.of_server(self.site.server.postmaster_pid) - server
        if progress["numInputRows"] != self.new:
            raise AssertionError(f"a batch of {progress['numInputRows']}, not {self.new}")
        assert server > before
        return Reading(
            self.name, self.new, seconds, server_cpu, self.lab.cpu_seconds() - clients, {"seconds": seconds}
        )

    def stop(self) -> None:
        self.query.stop()

    def _batch(self) -> Any:
        """The progress of the batch that came to the end."""
        last = self.query.lastProgress
        if last is None or last["numInputRows"] == 0 or last["batchId"] == self._seen:
            return None
        self._seen = last["batchId"]
        return last

    _seen = -1

    def _until(self, condition: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE
        while not (found := condition()):
            failure = self.query.exception()
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: no batch within {_PATIENCE:g} s")
            time.sleep(0.02)
        return found
