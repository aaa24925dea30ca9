"""A server whose clock is set by hand, under libfaketime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from harness.server import Server

_WHERE = "*/faketime/libfaketimeMT.so.1"


class Clock:
    """How far a server's clock is ahead of the real one. It is read at every look at the clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ahead = timedelta()

    def set(self, ahead: timedelta) -> None:
        self.step(f"{ahead.total_seconds():+.6f}")
        self.ahead = ahead

    def step(self, offset: str) -> None:
        """Sets the clock to an offset as libfaketime reads it, `-10m` for example."""
        # Replaced, not rewritten: no reader may find half of it.
        new = self._path.with_suffix(".new")
        new.write_text(f"{offset}\n")
        new.chmod(0o644)
        new.replace(self._path)


@contextmanager
def clocked(
    major: int, *, name: str = "clock", copy_of: Server | None = None
) -> Generator[tuple[Server, Clock]]:
    """A server and its clock. Only the server's: processes started from here have the real one.

    PostgreSQL asks for the time where a timer fires, and libfaketime allocates memory then, even amid another
    allocation. That can abort the server, so a long run must let no `statement_timeout` fire. PostgreSQL
    leaves the timer of a statement that ended, so any of a few seconds does.
    """
    found = sorted(Path("/usr/lib").glob(_WHERE))
    if not found:
        raise FileNotFoundError("libfaketime is not installed: Debian's package faketime")
    # Under /tmp, where the server's account may read it.
    with tempfile.TemporaryDirectory(prefix="pgmb-clock-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        clock = Clock(Path(folder) / "offset")
        clock.set(timedelta())
        faked = {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(Path(folder) / "offset"),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        os.environ.update(faked)
        try:
            server = Server.start(major, name=name, memory=True, copy_of=copy_of)
        finally:
            for variable in faked:
                del os.environ[variable]
        with server:
            yield server, clock
