"""A reader that is killed and resumed, while archiving and retention move the border under it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars
import pytest

from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database, pytest.mark.timeout(300)]

# Writes each event with the position after it, as one line, and begins where the last whole line says.
READER = """
import os, sys, pgmb
dsn, path = sys.argv[1:]
lines = open(path).read().splitlines(keepends=True)
whole = [line for line in lines if line.endswith("\\n")]
os.truncate(path, sum(map(len, whole)))
with pgmb.connect(dsn, max_size=2) as broker, open(path, "a") as file:
    after = whole[-1].split(" ", 2)[2].strip() if whole else broker.earliest()
    with broker.tail(after=after) as tail:
        for event in tail:
            file.write(f"{event.seq} {event.topic} {tail.position}\\n")
            file.flush()
            if event.topic == "end":
                break
"""
BORDERS = 6


class Reader:
    def __init__(self, dsn: str, path: Path) -> None:
        self._command, self.path = [sys.executable, "-c", READER, dsn, str(path)], path
        self.started = 0
        path.touch()
        self.start()

    def start(self) -> None:
        self.started += 1
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.wait() == -signal.SIGKILL

    def join(self) -> None:
        assert self._process.wait() == 0

    def wait_beyond(self, size: int) -> None:
        while self.size() <= size:
            assert self._process.poll() is None, "the reader ended"
            time.sleep(0.02)

    def size(self) -> int:
        return self.path.stat().st_size

    def seqs(self) -> list[int]:
        return [int(line.split(" ", 1)[0]) for line in self.path.read_text().splitlines()]


def test_a_reader_that_is_killed_and_resumed_misses_and_repeats_nothing(lake: Lake, tmp_path: Path) -> None:
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    for events in (300, 200):
        lake.publish(events)
    lake.archive()
    lake.db.execute("select pgmb.drop_segments()")
    reader = Reader(lake.dsn, tmp_path / "read")
    for border in range(BORDERS):
        lake.publish(50 + 17 * border)
        # A commit may have several segments; some are archived when the reader has come into the log.
        if border % 3 != 2:
            lake.archive()
        lake.db.execute("select pgmb.drop_segments()")
        if border % 4 == 1:
            size = reader.size()
            lake.publish(40, sealed=False)
            reader.wait_beyond(size)
            reader.kill()
            lake.publish(40, sealed=False)
            reader.start()
    lake.db.execute("select pgmb.publish('end', '0')")
    reader.join()
    assert reader.started == 3
    assert len(lake.dropped()) >= BORDERS - 1
    # The checker: Polars reads the table, psycopg the log.
    logged = [seq for (seq,) in lake.db.execute("select seq from pgmb.log_main")]
    archived = polars.read_delta(lake.url)["seq"].to_list()
    dropped = set(lake.dropped())
    written = sorted([*logged, *(seq for seq in archived if seq >> 40 in dropped)])
    assert len(written) == len(set(written))
    assert sorted(reader.seqs()) == written, "no gap and no repeat"
