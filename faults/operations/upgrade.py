"""A rolling upgrade and its way back, under load, with two versions of the package.

Clients publish and consume all the time, and `pgmb serve` is asked whether it is ready. First the next
package upgrades the schema. Then each client is replaced by one of the next package, and finally by one of
this package again. No call may fail, and no event may be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import pgmb
from harness.next_version import next_package
from harness.serving import serving

_CLIENT = Path(__file__).with_name("upgrade_client.py")
_CLIENTS = 3
_SLOWEST_SECONDS = 0.5
_EACH = 1_000_000
"""Numbers per client: more than it can publish."""


@dataclass
class Result:
    calls: int = 0
    failed: list[str] = field(default_factory=list)
    slowest: float = 0.0
    lost: int = 0
    doubled: int = 0
    not_ready: int = 0

    @property
    def holds(self) -> bool:
        return not (self.failed or self.lost or self.not_ready) and self.slowest < _SLOWEST_SECONDS

    def __str__(self) -> str:
        lines = [f"failed: {text}" for text in self.failed[:5]]
        lines.append(
            f"{self.calls} calls, {len(self.failed)} failed, {self.lost} lost, {self.doubled} received twice,"
            f" {self.not_ready} answers not ready, longest wait {self.slowest * 1000:.0f} ms"
        )
        return "\n".join(lines)


class _Client:
    def __init__(self, dsn: str, package: Path, first: int) -> None:
        self._process = subprocess.Popen(
            # -P: the folder has modules named like some of the standard library.
            [sys.executable, "-P", str(_CLIENT), dsn, str(first)],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> dict[str, Any]:
        told, _ = self._process.communicate(timeout=60)
        return dict(json.loads(told))


def run(dsn: str, seconds: float) -> Result:
    """`seconds`: how long each of the four stages lasts at least."""
    result = Result()
    reports: list[dict[str, Any]] = []
    this = Path(pgmb.__file__).parents[1]
    with tempfile.TemporaryDirectory(prefix="pgmb-upgrade-") as folder:
        newer = next_package(Path(folder))
        starts = iter(range(0, 1_000 * _EACH, _EACH))
        clients = [_Client(dsn, this, next(starts)) for _ in range(_CLIENTS)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_asking(dsn, this, result))
            time.sleep(seconds)
            _upgrade(dsn, newer)
            time.sleep(seconds)
            for package in (newer, this):
                served = stack.enter_context(_asking(dsn, package, result))
                for number, client in enumerate(clients):
                    clients[number] = _Client(dsn, package, next(starts))
                    reports.append(client.end())
                served()
                time.sleep(seconds)
        reports += [client.end() for client in clients]
        _judge(dsn, reports, result)
    return result


def _upgrade(dsn: str, package: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pgmb", "upgrade", "--dsn", dsn],
        env={**os.environ, "PYTHONPATH": str(package)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


@contextmanager
def _asking(dsn: str, package: Path, result: Result) -> Generator[Any]:
    """`pgmb serve` of a package, asked all the time whether it is ready."""
    ending = threading.Event()

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=10) as http:
            while not ending.wait(0.05):
                result.not_ready += http.get("/readyz").status_code != 200

    with serving(dsn, "serve", environment={"PYTHONPATH": str(package)}) as served:
        thread = threading.Thread(target=ask, args=[served.url])
        thread.start()

        def end() -> None:
            ending.set()
            thread.join()

        yield end
        end()


def _judge(dsn: str, reports: list[dict[str, Any]], result: Result) -> None:
    published = [number for report in reports for number in report["published"]]
    received = Counter(number for report in reports for number in report["received"])
    with pgmb.connect(dsn) as broker:
        while lease := broker.receive("upgrade", max=500):
            received.update(event.payload for event in lease)
            lease.ack()
    result.calls = len(published) + received.total()
    result.failed = [text for report in reports for text in report["failed"]]
    result.slowest = max(report["slowest"] for report in reports)
    result.lost = len(set(published) - received.keys())
    result.doubled = sum(count > 1 for count in received.values())
