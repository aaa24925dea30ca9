"""Forks under a supervisor: replaced when they end, hang or are silent, and ended with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from pgmb.services import supervisor as supervision
from pgmb.services.fork import Board, ProcessState
from pgmb.services.parent import Parent

_PROGRAM = """
import asyncio, logging, os, resource, signal, sys, time
from pgmb.services import resources, supervisor as supervision
from pgmb.services import parent as parent_module
from pgmb.services.fork import Board
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
supervision._SILENT_SECONDS = 1.0
resources._LACKING_SECONDS = 0.1
parent_module._REPORT_EVERY_SECONDS = 0.05
supervision._FIRST_PAUSE_SECONDS = 0.01
supervision._LONGEST_PAUSE_SECONDS = 0.01
def working(parent):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while parent.alive:
        parent.report()
        time.sleep(0.05)
    return 0
def limited(kind, most, parent):
    async def report():
        reporting = asyncio.create_task(parent.keep_reporting())
        await asyncio.sleep(0)
        resource.setrlimit(kind, (most, most))
        await reporting
    asyncio.run(report())
def odd(parent):
    {odd}
board = Board()
children = [supervision.Child("working", run=working), supervision.Child("odd", run=odd, background=True)]
sys.exit(asyncio.run(supervision.keep(children, board)))
"""


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("os._exit(7)", "odd ended (exit code 7)"),
        ("raise LookupError", "odd ended (exit code 1)"),
        ("time.sleep(600)", "odd is silent for 1 s; killing it"),
        ("parent.report('ticker'); time.sleep(600)", "odd makes no progress (ticker); killing it"),
        ("limited(resource.RLIMIT_NOFILE, 3, parent)", "odd makes no progress (open files); killing it"),
        ("limited(resource.RLIMIT_AS, 1 << 20, parent)", "odd makes no progress (memory); killing it"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "odd is silent for 1 s; killing it"),
    ],
)
def test_a_fork_that_fails_is_replaced_and_the_other_stays(odd: str, said: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM).replace("{odd}", odd)],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        seen: list[str] = []
        for line in program.stdout:
            seen.append(line)
            if sum("odd runs in process" in one for one in seen) == 3:
                break
        assert any(said in line for line in seen)
        assert sum("working runs in process" in one for one in seen) == 1
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=30)
    assert program.returncode in (0, 1)


def test_a_fork_that_fails_again_and_again_ends_all() -> None:
    text = textwrap.dedent(_PROGRAM).replace("{odd}", "return 3")
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "odd failed 10 times in a row; ending all" in done.stdout


async def test_a_supervisor_counts_forks_that_do_not_report() -> None:
    board = Board()
    supervisor = supervision.Supervisor(None, board=board)

    def silent_later(parent: Parent) -> int:
        parent.report()
        time.sleep(600)
        return 0

    def reports(parent: Parent) -> int:
        while parent.alive:
            parent.report()
            time.sleep(0.05)
        return 0

    supervisor.start(supervision.Child("silent", run=silent_later))
    supervisor.start(supervision.Child("reporting", run=reports))
    async with asyncio.timeout(30):
        while board.troubled() != ["silent"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    supervisor.kill(0)
    await supervisor.finish()


def test_a_board_that_is_not_written_names_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    states = [ProcessState("upkeep", None, 3, True), ProcessState("http", 7, 0, False)]
    board.write(states)
    assert board.troubled() == ["upkeep"]
    pid = os.fork()
    if pid == 0:
        board.write([ProcessState("of the child", 1, 0, True)])
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.troubled() == ["of the child"]
    board.write(states * 1000)
    assert board.processes() == states * 1000
    board.write([ProcessState("of the child", 1, 0, True)])
    monkeypatch.setattr(Board, "_STALE_SECONDS", -1.0)
    assert board.troubled() == ["of the child", "supervisor"]
