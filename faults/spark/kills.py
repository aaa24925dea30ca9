"""SIGKILL to the driver and the executors of streaming queries, again and again, while they work."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

from faults.spark.console import PATIENCE, Console, NotDoneError
from faults.spark.files import committed
from faults.spark.traffic import Traffic
from harness.processes import send
from harness.spark import TOO_SLOW, Cluster

SETTINGS = {
    # The sink's log keeps every entry: which file is of which batch is asked in the end.
    "spark.sql.streaming.fileSink.log.deletion": "false",
    "spark.task.maxFailures": "8",
}


class Killed:
    """Queries on a cluster, in one driver that is started anew as it is killed."""

    def __init__(self, cluster: Cluster, flows: list[dict[str, Any]], seed: int) -> None:
        self._cluster = cluster
        self._flows = flows
        self._chance = random.Random(seed)
        self._console: Console | None = None
        self.driver_kills = 0
        self.executor_kills = 0
        self.restarts = 0
        """Of a query that was too slow, without a kill."""
        self.tasks_lost = 0

    def withstand(self, traffic: Traffic, *, drivers: int, executors: int) -> int:
        """Kills amid writers and retention, then reads to the end. Returns how many segments were dropped."""
        try:
            with traffic:
                self.start()
                self.wait_for_progress()
                traffic.retain("1 second")
                self.run(drivers=drivers, executors=executors)
                traffic.quieten()
                self.drain()
                return traffic.dropped_segments(30)
        finally:
            self.close()

    def run(self, *, drivers: int, executors: int) -> None:
        """Kills, each time some while after every query has got on since the last."""
        order = ["driver"] * drivers + ["executor"] * executors
        self._chance.shuffle(order)
        for kind in order:
            self.wait_for_progress()
            time.sleep(self._chance.random() * 1.5)
            if kind == "driver":
                self.close()
                self.driver_kills += 1
                self.start()
            else:
                pids = self._cluster.executor_pids()
                if not pids:
                    raise RuntimeError("there is no executor to kill")
                send(self._chance.choice(pids), signal.SIGKILL)
                self.executor_kills += 1
        self.wait_for_progress()

    def drain(self) -> None:
        """Reads to the end of what there is, without another kill."""
        for _ in range(20):
            try:
                return self._running().do("drain", flows=self._flows)
            except NotDoneError as error:
                self._only_slow(error)
        raise TimeoutError(f"the queries do not come to an end:\n{self._running().said()}")

    def close(self) -> None:
        """Kills the driver as well, if there is one."""
        if self._console is not None:
            self.tasks_lost += self._console.tasks_lost()
            self._console.kill()
            self._console = None

    def _running(self) -> Console:
        if self._console is None:
            raise RuntimeError("no driver is running")
        return self._console

    def start(self) -> None:
        """A driver, and the queries in it."""
        self._console = Console(self._cluster, SETTINGS)
        self._console.do("start", flows=self._flows)

    def wait_for_progress(self) -> None:
        """Until every query has committed another batch."""
        checkpoints = [Path(flow["checkpoint"]) for flow in self._flows]
        before = [committed(checkpoint) for checkpoint in checkpoints]
        deadline = time.monotonic() + PATIENCE
        while any(committed(checkpoint) <= old for checkpoint, old in zip(checkpoints, before, strict=True)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the queries do not get on:\n{self._running().said()}")
            try:
                self._running().do("check")
            except NotDoneError as error:
                self._only_slow(error)
                self._running().do("start", flows=self._flows)
            time.sleep(0.1)

    def _only_slow(self, error: NotDoneError) -> None:
        if TOO_SLOW not in str(error):
            raise error
        self.restarts += 1
