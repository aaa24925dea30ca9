"""Each process of `pgmb serve` fails in four ways, comes back, and the others go on."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx
import psutil

import pgmb
from harness.serving import Served, serving

_PARTS = ("dispatcher", "upkeep", "http")
_WITHIN_SECONDS = 60.0


def _kill(process: psutil.Process) -> None:
    process.kill()


def _stop(process: psutil.Process) -> None:
    process.suspend()


def _take_files(process: psutil.Process) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, 3))


def _take_memory(process: psutil.Process) -> None:
    most = process.memory_info().vms // 4
    resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))


FAULTS: dict[str, Callable[[psutil.Process], None]] = {
    "killed": _kill,
    "stopped": _stop,
    "out of files": _take_files,
    "out of memory": _take_memory,
}


class Outcome(NamedTuple):
    part: str
    fault: str
    back_after: float | None
    others_stayed: bool
    longest_publish: float

    @property
    def holds(self) -> bool:
        return self.back_after is not None and self.others_stayed and self.longest_publish < 1.0

    def __str__(self) -> str:
        back = "not back" if self.back_after is None else f"back after {self.back_after:.1f} s"
        others = "others stayed" if self.others_stayed else "OTHERS RESTARTED"
        return (
            f"{self.part} {self.fault}: {back}, {others}, publishes took {self.longest_publish:.2f} s at most"
        )


def run(dsn: str) -> list[Outcome]:
    with serving(dsn, "serve") as served:
        _until_live(served)
        return [_provoke(served, dsn, part, fault) for fault in FAULTS for part in _PARTS]


def _provoke(served: Served, dsn: str, part: str, fault: str) -> Outcome:
    before, began, longest = _pids(served), time.monotonic(), 0.0
    FAULTS[fault](psutil.Process(before[part]))
    with pgmb.connect(dsn) as broker:
        while True:
            publishing = time.monotonic()
            broker.publish("t", 1)
            longest = max(longest, time.monotonic() - publishing)
            after = _pids(served)
            passed = time.monotonic() - began
            back = after[part] != before[part] and _is_live(served)
            if back or passed > _WITHIN_SECONDS:
                others = all(after[name] == before[name] for name in _PARTS if name != part)
                return Outcome(part, fault, passed if back else None, others, longest)
            time.sleep(0.2)


def _pids(served: Served) -> dict[str, int]:
    return {name: int(pid) for name, pid in re.findall(r"(\w+) runs in process (\d+)", served.log)}


def _is_live(served: Served) -> bool:
    try:
        return httpx.get(f"{served.url}/livez", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def _until_live(served: Served) -> None:
    deadline = time.monotonic() + _WITHIN_SECONDS
    while not _is_live(served):
        assert time.monotonic() < deadline
        time.sleep(0.1)
