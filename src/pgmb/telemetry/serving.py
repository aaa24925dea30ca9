"""Prometheus over HTTP for `pgmb work`: one port, however many processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric, start_http_server
from prometheus_client import multiprocess as _untyped
from prometheus_client.registry import Collector

from pgmb.telemetry.metrics import StatusCollector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""By this prometheus_client in a worker process learns where to write what its parent serves."""

multiprocess: Any = _untyped

_OF_THE_POOL = ("min_size", "max_size", "max_wait", "pooler")


@contextlib.contextmanager
def serving(
    port: int, dsn: str, connection: Mapping[str, Any], registry: CollectorRegistry = REGISTRY
) -> Generator[None]:
    """Serve the registry, and the status of the database."""
    options = {name: value for name, value in connection.items() if name not in _OF_THE_POOL}
    collector = StatusCollector(dsn, **options)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, registry=registry)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    finally:
        registry.unregister(collector)
        collector.close()


@contextlib.contextmanager
def serving_workers(port: int, dsn: str, connection: Mapping[str, Any]) -> Generator[dict[str, str]]:
    """The same for worker processes, summed up. Gives what their environment needs."""
    with collecting_workers() as workers:
        registry = CollectorRegistry()
        registry.register(workers)
        with serving(port, dsn, connection, registry):
            yield workers.environment


@contextlib.contextmanager
def collecting_workers() -> Generator[WorkersCollector]:
    """Collect what worker processes write, in a folder that is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="pgmb-metrics-") as folder:
        yield WorkersCollector(folder)


class WorkersCollector(Collector):
    """What worker processes wrote. Counts of those that ended stay, what they had under way does not."""

    def __init__(self, folder: str) -> None:
        self.environment = {FOLDER: folder}
        """What the environment of the processes needs."""
        self._written = multiprocess.MultiProcessCollector(None, folder)
        self._folder = Path(folder)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for path in self._folder.glob("gauge_live*.db"):
            process = int(path.stem.rpartition("_")[2])
            if not _alive(process):
                multiprocess.mark_process_dead(process, str(self._folder))
        yield from self._written.collect()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
