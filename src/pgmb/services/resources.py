"""The open files and the memory of a process: as many as it may have, and whether it has none left."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_LACKING_SECONDS = 20.0
"""Without files or memory for so long, a process is of no use. A shortage that load causes ends sooner."""
_PROBE_BYTES: Final = 16 << 20


def raise_file_limit() -> int:
    """Let this process open as many files as the system permits. Returns how many."""
    with suppress(ImportError, OSError, ValueError):
        # Not on every system.
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return 1 << 20 if most == resource.RLIM_INFINITY else most
    return 1024


class Resources:
    """Looks whether this process can still open a file and take memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._probes: dict[str, Callable[[], None]] = {"open files": _open, "memory": _allocate}

    def lacking(self) -> list[str]:
        """What no look has found for 20 seconds. Call it about each second."""
        now = self._clock()
        for name, probe in self._probes.items():
            try:
                probe()
            except (OSError, MemoryError):
                self._since.setdefault(name, now)
            else:
                self._since.pop(name, None)
        return [name for name, since in self._since.items() if now - since >= _LACKING_SECONDS]


def _open() -> None:
    os.close(os.open(os.devnull, os.O_RDONLY))


def _allocate() -> None:
    # Address space that is not written: it costs a system call.
    mmap.mmap(-1, _PROBE_BYTES).close()
