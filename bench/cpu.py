"""Time on a processor, in nanoseconds: the scheduler's own count, finer than the ticks of /proc/PID/stat."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from harness import processes

MYSELF = os.getpid()
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def of_process(pid: int) -> float:
    """Seconds that one process ran, user and system; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def of_server(postmaster: int) -> float:
    """Seconds that a server's processes ran, those that ended since included (to the tick)."""
    family = [postmaster, *processes.children(postmaster)]
    return sum(of_process(pid) for pid in family) + _ended(postmaster)


def _ended(pid: int) -> float:
    """Time of the children that ended: fields 16 and 17 of /proc/PID/stat."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[13]) + int(fields[14])) * _TICK


def idle() -> float:
    """Seconds that the machine's processors had nothing to do, all of them together, to the tick."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) * _TICK


def of_families(roots: Iterable[int]) -> float:
    """Seconds of these processes and all their descendants, to the tick, ended ones included once reaped."""
    members = {pid for root in roots for pid in (root, *processes.descendants(root))}
    return sum(processes.own_and_reaped(pid) for pid in members)
