"""Where Spark is measured: a cluster of two workers of one core, and a session of this process on it."""

from __future__ import annotations

import contextlib
import itertools
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench import cpu
from bench.outcome import Outcome, Reading
from bench.spark.reference import Reference
from harness.server import Server
from harness.spark import Cluster, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PSQL = "psql"
BY_CPU = "events by processor second, the server's and all others'"


class Lab:
    """Started once for all rows of a run."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="pgmb-lab-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._numbers = itertools.count()
        try:
            self.cluster = self._stack.enter_context(Cluster.start())
            self.spark: SparkSession = self._stack.enter_context(
                session(
                    self.directory,
                    self.cluster.url,
                    {
                        "spark.sql.streaming.pollingDelay": "100ms",
                        # As pgmb writes it.
                        "spark.sql.parquet.compression.codec": "zstd",
                        "spark.hadoop.parquet.compression.codec.zstd.level": "1",
                    },
                    lasting=True,
                )
            )
        except BaseException:
            self._stack.close()
            raise
        self.spark.dataSource.register(Reference)

    def folder(self) -> Path:
        """A new name in the scratch directory."""
        return self.directory / f"folder-{next(self._numbers)}"

    def cpu_seconds(self) -> float:
        """Of the driver, the cluster and whatever they started."""
        return cpu.of_families([cpu.MYSELF, self.cluster.master_pid, *self.cluster.worker_pids])

    def measure(self, name: str, server: Server, events: int, work: Callable[[], None]) -> Reading:
        """One contender's turn, the server's processes and all others apart. That of psql is charged what
        psql takes, not what Spark does meanwhile."""
        spent = _ended_children if name == PSQL else self.cpu_seconds
        ours, theirs = spent(), cpu.of_server(server.postmaster_pid)
        started = time.perf_counter()
        work()
        wall = time.perf_counter() - started
        ours, theirs = spent() - ours, cpu.of_server(server.postmaster_pid) - theirs
        return Reading(name, events, wall, theirs, ours, {BY_CPU: events / (ours + theirs)})

    def close(self) -> None:
        self._stack.close()


def _ended_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_notes(outcome: Outcome, limit: str) -> list[str]:
    """Processor seconds for a million events, Spark's and the clients' apart from the server's; and what they
    are all together beside those of the limit, which a busy machine changes less than the time it takes."""
    notes = []
    for name in outcome.contenders():
        readings = outcome.of(name)
        events = sum(reading.messages for reading in readings) / 1e6
        clients = sum(reading.client_cpu for reading in readings) / events
        server = sum(reading.server_cpu for reading in readings) / events
        notes.append(
            f"{name}: CPU s per million {clients:.2f} app + {server:.2f} PostgreSQL, "
            f"{outcome.ratio(name, limit, BY_CPU):.2f}x of {limit} by CPU"
        )
    return notes
