"""An archiver that is killed after any step: the next one ends its work, and each event is there once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from harness.lake import STEPS
from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database]


def killed(lake: Lake, step: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.lake", lake.dsn, "main", "--die-after", step],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    lake.await_end_of_archivers()


@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_archiver_left_is_taken_up(lake: Lake, step: str) -> None:
    lake.publish(300)
    lake.publish(0)
    lake.publish(200)
    killed(lake, step)
    recorded = lake.value("select count(*) from pgmb.archived where verified_at is not null")
    lake.age()
    assert len(lake.dropped()) == recorded, "only what was verified is dropped"
    assert recorded == {"first record": 1, "settle": 3}.get(step, 0)
    adopted = step in ("commit", "first read", "verify", "first record")
    done = lake.archive()
    assert [one.adopted for one in done] == ([] if step == "settle" else [adopted])
    assert lake.value("select count(*) from pgmb.archived where verified_at is not null") == 3
    lake.age()
    assert lake.dropped() == [0, 1, 2]
    assert [event[0] & (1 << 40) - 1 for event in lake.stored()] == [*range(1, 301), *range(1, 201)]
