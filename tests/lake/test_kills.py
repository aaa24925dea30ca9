"""An archiver that is killed after any step: the next one ends its work, and each event is there once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from harness.lake import STEPS, Killed
from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database]


def end_after(lake: Lake, step: str) -> None:
    """By SIGKILL where the table and the database differ, otherwise in this process: `python -m faults
    lake-kills` sends it after each step."""
    if step == "commit":
        command = [sys.executable, "-m", "harness.lake", lake.dsn, "main", "--die-after", step]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        archiver = lake.archiver()
        archiver.die_after, archiver.here = step, True
        with pytest.raises(Killed):
            list(archiver.archive())
    lake.await_end_of_archivers()


def test_what_a_killed_archiver_left_is_taken_up(lake: Lake) -> None:
    for number, step in enumerate(STEPS):
        before = 2 * number
        lake.publish(20)
        lake.publish(0)
        end_after(lake, step)
        recorded = lake.value("select count(*) from pgmb.archived where verified_at is not null") - before
        lake.age()
        assert len(lake.dropped()) == before + recorded, "only what was verified is dropped"
        assert recorded == {"first record": 1, "settle": 2}.get(step, 0), step
        adopted = step in ("commit", "first read", "verify", "first record")
        done = lake.archive()
        assert [one.adopted for one in done] == ([] if step == "settle" else [adopted]), step
        assert lake.value("select count(*) from pgmb.archived where verified_at is not null") == before + 2
        lake.age()
        assert lake.dropped() == [*range(before + 2)]
    assert [event[0] & (1 << 40) - 1 for event in lake.stored()] == [*range(1, 21)] * len(STEPS)
