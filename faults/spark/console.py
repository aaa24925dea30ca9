"""A driver process that does what it is asked and may be stopped or killed meanwhile."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from harness.processes import children_of, send
from harness.spark import Cluster, Driver

PATIENCE = 900.0
"""Seconds for one thing that was asked, on a machine that does much else."""


class NotDoneError(Exception):
    """What was asked of the driver failed; the message is its error."""


class Console:
    """A driver, on a cluster or without one, see `faults.spark.programs.console`. One thing at a time."""

    def __init__(self, cluster: Cluster | None, conf: Mapping[str, str] | None = None) -> None:
        submit = Driver.start if cluster is None else cluster.submit
        self._driver = submit("faults.spark.programs.console", conf=conf)
        self._folder = self._driver.directory / "asked"
        self._folder.mkdir(exist_ok=True)
        self._asked = 0

    def do(self, verb: str, **arguments: Any) -> None:
        self.ask(verb, **arguments)
        self.wait()

    def ask(self, verb: str, **arguments: Any) -> None:
        draft = self._folder / "draft"
        draft.write_text(json.dumps([verb, arguments]))
        draft.rename(self._folder / f"{self._asked}.ask")
        self._asked += 1

    def wait(self) -> None:
        """Until the last thing asked is done. Raises NotDoneError when it failed."""
        path = self._folder / f"{self._asked - 1}.answer"
        deadline = time.monotonic() + PATIENCE
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the driver has not answered in {PATIENCE:.0f} s:\n{self.said()}")
            time.sleep(0.01)
        answer = json.loads(path.read_text())
        if "error" in answer:
            raise NotDoneError(answer["error"])

    @property
    def busy(self) -> bool:
        return not (self._folder / f"{self._asked - 1}.answer").exists()

    def check(self) -> None:
        """Raises if the driver ended by itself."""
        if self._driver.process.poll() is not None:
            raise RuntimeError(f"the driver ended with {self._driver.process.returncode}:\n{self.said()}")

    def said(self) -> str:
        return self._driver.output()[-4000:]

    def tasks_lost(self) -> int:
        """How many attempts at tasks the driver saw fail."""
        return self._driver.output().count("Lost task ")

    def freeze(self) -> None:
        """Stops the driver's JVM, not its Python processes."""
        for pid in children_of(self._driver.process.pid):
            send(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL to all of the driver's processes."""
        self._driver.kill()
        self._driver.close()

    def close(self) -> None:
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
