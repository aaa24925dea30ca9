"""What /proc tells about a process and its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Generator, Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")
_SHARED_MEMORY = re.compile(r"/dev/shm/PostgreSQL\.\d+")


def alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits to be reaped does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        pass
    except ProcessLookupError:
        return []
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    """The running children of all threads of a process; `children` knows those of the first only."""
    return [child for child, parent in _parents().items() if parent == pid and alive(child)]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    parents, found = _parents(), [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found[1:]


def _parents() -> dict[int, int]:
    """The parent of every process."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid: int(fields[1]) for pid in pids if (fields := _stat(pid)) is not None}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its exited children and its running children."""
    ticks = 0
    for _ in range(20):
        before, running, after = _stat(pid), _running_ticks(pid), _stat(pid)
        if before is None or after is None:
            return 0.0
        ticks = sum(int(field) for field in after[11:15]) + running
        # A child that exited while we read was counted twice or not at all: read again.
        if before[13:15] == after[13:15]:
            break
    return ticks / _TICKS


def own_and_reaped(pid: int) -> float:
    """User and system time of a process and of those children that have ended; 0 if it is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else sum(int(field) for field in fields[11:15]) / _TICKS


def _running_ticks(pid: int) -> int:
    found = (_stat(child) for child in children(pid))
    return sum(int(fields[11]) + int(fields[12]) for fields in found if fields is not None)


def shared_memory_files(pids: Iterable[int]) -> set[Path]:
    """The POSIX shared memory of these processes, which nobody removes when they are killed."""
    found: set[Path] = set()
    for pid in pids:
        try:
            found.update(Path(name) for name in _SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue
    return found


def send(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def kill_family(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """SIGKILL to a process and its children, such that none of them acts in between or is born meanwhile."""
    with _adopting_orphans():
        send(process.pid, signal.SIGSTOP)
        orphans = children(process.pid)
        for member in [*orphans, process.pid]:
            send(member, signal.SIGKILL)
        process.wait(timeout)
        wait_gone(orphans, timeout)
        for orphan in orphans:
            try:
                os.waitpid(orphan, 0)
            except ChildProcessError:
                continue  # adopted, and buried, by somebody else


def kill_group(group: int, timeout: float = 10.0) -> None:
    """SIGKILL to a process group and to all descendants of its members, which are reaped where they are
    ours or become so; the members that the caller started are left to it to wait for."""
    with _adopting_orphans():
        members = [pid for pid in _parents() if _group(pid) == group]
        orphans = {pid for member in members for pid in descendants(member)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for pid in orphans:
            send(pid, signal.SIGKILL)
        wait_gone([*members, *orphans], timeout)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _group(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[2])


@contextlib.contextmanager
def _adopting_orphans() -> Generator[None]:
    """Children of a killed child become ours to reap: in a container, process 1 may be none that does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def wait_gone(pids: Iterable[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = list(pids)
    while waiting := [pid for pid in waiting if alive(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {waiting} did not end within {timeout} s")
        time.sleep(0.005)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name: state, ppid, ..., and from 11 on
    utime, stime, cutime, cstime."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()
