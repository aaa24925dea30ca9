"""Threads of a run. The first error among them ends the run and is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Crew:
    """Starts functions in threads; `join` waits for some of them and raises what any of them raised."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self._error: BaseException | None = None

    def start(self, name: str, function: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(function,), name=name, daemon=True)
        thread.start()
        return thread

    def join(self, *threads: threading.Thread, timeout: float = 600.0) -> None:
        for thread in threads:
            waited = 0.0
            while thread.is_alive() and not self.failed.is_set() and waited < timeout:
                thread.join(0.1)
                waited += 0.1
            self.check()
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} did not end within {timeout:.0f} s")

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            if self._error is None:
                self._error = error
            self.failed.set()
