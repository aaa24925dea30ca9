"""Prometheus metrics of the processes of one supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_LABELS = ("process",)


class _Use(NamedTuple):
    cpu_seconds: float
    resident_bytes: float
    open_files: float


def families_of(processes: Iterable[tuple[str, int | None, int, bool]]) -> Iterator[Metric]:
    """Metrics of processes: their names, pids, restarts, and whether they are in trouble.

    What a process uses is read from /proc, so it is left out on other systems than Linux.
    """
    up = GaugeMetricFamily("pgmb_process_up", "1 if the process runs and reports.", labels=_LABELS)
    restarts = CounterMetricFamily(
        "pgmb_process_restarts", "How often the process was started again.", labels=_LABELS
    )
    cpu = CounterMetricFamily("pgmb_process_cpu_seconds", "CPU time of the process.", labels=_LABELS)
    memory = GaugeMetricFamily(
        "pgmb_process_resident_memory_bytes", "Memory of the process, shared memory included.", labels=_LABELS
    )
    files = GaugeMetricFamily("pgmb_process_open_files", "Open files of the process.", labels=_LABELS)
    for name, pid, started_again, troubled in processes:
        up.add_metric([name], float(not troubled))
        restarts.add_metric([name], started_again)
        used = None if pid is None else _use(pid)
        if used is not None:
            cpu.add_metric([name], used.cpu_seconds)
            memory.add_metric([name], used.resident_bytes)
            files.add_metric([name], used.open_files)
    yield from (up, restarts, cpu, memory, files)


def _use(pid: int) -> _Use | None:
    place = Path("/proc", str(pid))
    try:
        # After the program's name, which may contain anything.
        fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
        pages = int((place / "statm").read_bytes().split()[1])
        files = sum(1 for _ in (place / "fd").iterdir())
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return _Use(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"), files)
