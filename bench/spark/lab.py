"""Where Spark is measured: a cluster of two workers of one core, and a session of this process on it."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench import cpu
from bench.outcome import Reading
from bench.spark.reference import Reference
from harness.server import Server
from harness.spark import Cluster, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
                        "spark.sql.parquet.compression.codec": "zstd",
                    },
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
        """One contender's turn, the server's processes and all others apart."""
        ours, theirs = self.cpu_seconds(), cpu.of_server(server.postmaster_pid)
        started = time.perf_counter()
        work()
        wall = time.perf_counter() - started
        ours, theirs = self.cpu_seconds() - ours, cpu.of_server(server.postmaster_pid) - theirs
        return Reading(name, events, wall, theirs, ours)

    def close(self) -> None:
        self._stack.close()


def cpu_per_million(name: str, readings: list[Reading]) -> str:
    """Processor seconds for a million events, Spark's and the clients' apart from the server's."""
    events = sum(reading.messages for reading in readings) / 1e6
    clients = sum(reading.client_cpu for reading in readings) / events
    server = sum(reading.server_cpu for reading in readings) / events
    return f"{name}: CPU s per million {clients:.2f} app + {server:.2f} PostgreSQL"
