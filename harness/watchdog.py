"""Removes a server when the process that started it is gone without having done so (SIGKILL).

Run as a script: `watchdog.py DIRECTORY PIDFILE SIGNAL`. Its standard input is a pipe nobody writes to; it
ends with the process that holds the other end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO


def watch(directory: Path, pidfile: Path, signal_number: int) -> subprocess.Popen[bytes]:
    """Starts the watchdog. Closing its standard input makes it remove what is left, and end."""
    return subprocess.Popen(
        # Isolated and without site-packages: it starts in a few milliseconds and depends on nothing.
        [sys.executable, "-I", "-S", __file__, str(directory), str(pidfile), str(signal_number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _main(stdin: IO[bytes], directory: Path, pidfile: Path, signal_number: int) -> None:
    stdin.read()
    if not directory.exists():
        return
    try:
        pid = int(pidfile.read_text().split()[0])
        os.kill(pid, signal_number)
        for _ in range(500):
            os.kill(pid, 0)
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        pass
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.stdin.buffer, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
