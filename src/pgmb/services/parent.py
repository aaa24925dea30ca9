"""The parent of a process, as the process sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
from collections.abc import Callable, Sequence

from pgmb.services.resources import Resources

PARENT_PIPE = "PGMB_PARENT_PIPE"
"""The descriptor whose end of file tells a child process that its parent is gone."""

REPORT_PIPE = "PGMB_REPORT_PIPE"
"""The descriptor to which a child process writes that it works."""

_REPORT_EVERY_SECONDS = 1.0


class Parent:
    """The parent of this process, if it was started by a supervisor."""

    def __init__(self, alive: int, reports: int) -> None:
        self._alive = alive
        self._reports = reports
        for pipe in (alive, reports):
            os.set_inheritable(pipe, False)

    @classmethod
    def of_environment(cls) -> Parent | None:
        """Read once: children of this process are not the supervisor's."""
        alive, reports = os.environ.pop(PARENT_PIPE, None), os.environ.pop(REPORT_PIPE, None)
        return None if alive is None or reports is None else cls(int(alive), int(reports))

    @property
    def alive(self) -> bool:
        """Whether the parent still runs."""
        readable, _, _ = select.select([self._alive], [], [], 0)
        return not readable

    def when_gone(self, call: Callable[[], None]) -> None:
        """Have the event loop call this when the parent has ended, however it did."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._alive)
            call()

        loop.add_reader(self._alive, gone)

    def report(self, text: str = "") -> None:
        """Tell the parent that this process works."""
        # The parent may be gone.
        with contextlib.suppress(OSError):
            os.write(self._reports, json.dumps(text).encode() + b"\n")

    async def keep_reporting(self, hung: Callable[[], Sequence[str]] = tuple) -> None:
        """Tell the parent each second that this process works, and what in it does not, until cancelled."""
        resources = Resources()
        while True:
            self.report(", ".join([*hung(), *resources.lacking()]))
            await asyncio.sleep(_REPORT_EVERY_SECONDS)
