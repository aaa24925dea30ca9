"""A program in a terminal of its own: what it shows, and keys for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
_HOME = "\x1b[H"


class Terminal:
    """Runs a command in a pseudo terminal of fixed size. Leaving the `with` block ends it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        columns: int = 100,
        rows: int = 40,
        cwd: Path | None = None,
    ) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        surroundings = {**env, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=surroundings,
            start_new_session=True,
            cwd=cwd,
        )
        os.close(theirs)
        self._raw = b""

    @property
    def raw(self) -> str:
        """Everything that was written so far, escape sequences included."""
        return self._raw.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """The same without escape sequences, no spaces at the end of lines."""
        return plain(self.raw)

    @property
    def frame(self) -> str:
        """What was drawn since the cursor last went home: the newest frame of a program that redraws."""
        return plain(self.raw.rsplit(_HOME, 1)[-1])

    @property
    def frames(self) -> list[str]:
        """Every frame of such a program that is complete."""
        return [plain(drawn) for drawn in self.raw.split(_HOME)[1:-1]]

    def send(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still waiting; the terminal shows:\n{self.text}")
            if not self._read(0.2) and not condition():
                raise EOFError(f"the program has ended; the terminal showed:\n{self.text}")

    def finish(self, timeout: float = 30.0) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(0.2):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running; the terminal shows:\n{self.text}")
        return self.process.wait(timeout)

    def _read(self, seconds: float) -> bool:
        """Take what is there within that time. False at the end."""
        ready, _, _ = select.select([self._own], [], [], seconds)
        if not ready:
            return True
        try:
            got = os.read(self._own, 65536)
        except OSError:
            # Linux's way to say that the other side is closed.
            return False
        self._raw += got
        return bool(got)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        with contextlib.suppress(OSError):
            os.close(self._own)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain(raw: str) -> str:
    """Text without escape sequences, as lines without spaces at their end."""
    lines = _ESCAPE.sub("", raw).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines)
