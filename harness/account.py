"""The account servers run under. PostgreSQL refuses to run as root."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

_MEMORY = Path("/dev/shm")
_PLENTY = 4 * 1024**3


@dataclass(frozen=True)
class Account:
    """Who a server's processes belong to; `switch` says whether that is somebody else than us."""

    name: str
    uid: int
    gid: int
    switch: bool

    def own(self, path: Path) -> None:
        if self.switch:
            os.chown(path, self.uid, self.gid)

    def run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            check=False,
            capture_output=True,
            text=True,
            env=_environment(),
            cwd="/",  # ours may be unreadable for the other account
            **self._other,
        )

    def spawn(self, command: Sequence[str | Path], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A session of its own keeps the terminal's Ctrl-C away: we stop the server ourselves.
            start_new_session=True,
            env=_environment(),
            cwd="/",
            **self._other,
        )

    def reaches(self, program: Path) -> bool:
        """Whether this account may execute `program`, all directories above it included."""
        return self.run(["test", "-x", program]).returncode == 0

    @property
    def _other(self) -> _Other:
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}


class _Other(TypedDict, total=False):
    """What makes a process start under another account."""

    user: int
    group: int
    extra_groups: list[str | int]


def _environment() -> dict[str, str]:
    """Ours, without what would change the behaviour of PostgreSQL's programs."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    return kept | {"LC_ALL": "C", "TZ": "UTC", "HOME": "/"}


@functools.cache
def server_account() -> Account:
    if os.geteuid() != 0:
        return Account(pwd.getpwuid(os.geteuid()).pw_name, os.geteuid(), os.getegid(), switch=False)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid, switch=True)
    raise RuntimeError("root cannot run PostgreSQL, and there is no user postgres or nobody to run it")


def scratch_directory(prefix: str, *, memory: bool = False) -> Path:
    """A new directory the server account owns, with a path short enough to hold a unix socket.

    In `memory` if the machine has enough of it, because creating files, which is most of cloning a database,
    costs ten times more on some disks.
    """
    account = server_account()
    parent = Path(tempfile.gettempdir())
    if memory and _plenty_of_memory():
        parent = _MEMORY
    if len(str(parent)) > 60 or not account.reaches(parent):
        parent = Path("/tmp")  # the system's own, reachable by everybody
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    account.own(path)
    path.chmod(0o755)
    return path


def _plenty_of_memory() -> bool:
    try:
        available = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        return min(available, shutil.disk_usage(_MEMORY).free) >= _PLENTY and os.access(_MEMORY, os.W_OK)
    except (OSError, StopIteration):
        return False


def remove_directory(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
