"""Processes that run `pgmb dispatcher`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from harness.states import deliveries_waiting, leases_in_flight, queue_names, retries_waiting

LOOPBACK = ("127.0.0.0/8",)
_ROOT = Path(__file__).parents[1]
_READY_WITHIN = 60.0
_JOINED_AFTER = 4.5
"""Seconds after which those that were not alone take part: two heartbeats, and some."""


def _unsettled(connection: psycopg.Connection[Any]) -> bool:
    # In one snapshot: a delivery that fails between two looks would be in neither.
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        if deliveries_waiting(connection) or leases_in_flight(connection) or retries_waiting(connection):
            return True
        depths = [
            connection.execute("select pgmb.queue_depth(%s)", [queue]).fetchone()
            for queue in queue_names(connection)
        ]
    return any(depth != (0,) for depth in depths)


def wait_settled(connection: psycopg.Connection[Any], within: float = 120.0) -> float:
    """Until nothing waits in any queue, for any endpoint, or is under a lease; how many seconds that took."""
    began = time.monotonic()
    while _unsettled(connection):
        if time.monotonic() > began + within:
            raise TimeoutError(f"not all was settled within {within:.0f} s")
        time.sleep(0.02)
    return time.monotonic() - began


class Dispatchers:
    """So many of them, at work when this returns. `pids` are theirs."""

    def __init__(self, dsn: str, processes: int = 1, allow: Sequence[str] = LOOPBACK) -> None:
        self._dsn = dsn
        self._logs = tempfile.TemporaryDirectory(prefix="pgmb-dispatchers-")
        self._running: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-m", "pgmb", "dispatcher"]
        for network in allow:
            command += ["--allow", network]
        try:
            for number in range(processes):
                with self._log(number).open("wb") as log:
                    self._running.append(
                        subprocess.Popen(
                            command, cwd=_ROOT, env={**os.environ, "PGMB_DSN": dsn}, stdout=log, stderr=log
                        )
                    )
            self._wait(processes)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def close(self, within: float = 60.0) -> None:
        """Ends them as an operator would, and raises what they said if they did not end well."""
        try:
            for process in self._running:
                process.send_signal(signal.SIGTERM)
            for number, process in enumerate(self._running):
                if process.wait(within) != 0:
                    raise RuntimeError(f"a dispatcher ended with {process.returncode}: {self.said(number)}")
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)
        self._logs.cleanup()

    def said(self, number: int) -> str:
        """The end of what one of them wrote."""
        return self._log(number).read_text()[-2000:]

    def _log(self, number: int) -> Path:
        return Path(self._logs.name) / str(number)

    def _wait(self, processes: int) -> None:
        deadline = time.monotonic() + _READY_WITHIN
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while True:
                row = connection.execute("select count(*) from pgmb.dispatcher").fetchone()
                if row is not None and row[0] >= processes:
                    break
                for number, process in enumerate(self._running):
                    if process.poll() is not None:
                        raise RuntimeError(
                            f"a dispatcher ended with {process.returncode}: {self.said(number)}"
                        )
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {processes} dispatchers within {_READY_WITHIN:.0f} s")
                time.sleep(0.05)
        if processes > 1:
            time.sleep(_JOINED_AFTER)
