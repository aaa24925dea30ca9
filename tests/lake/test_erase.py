"""After an erasure the values of a key are in no file of the log or the lake. Counts, positions and digests
stay right, readers go on, and an erasure that is killed at any step is continued."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import pgmb
from harness.erase import erase_and_die
from harness.lake import Killed
from harness.s3 import BUCKET
from harness.segments import seal
from harness.traces import in_bytes, in_database, in_lake
from pgmb.erasure import Erased, Eraser
from pgmb.errors import Conflict, VerificationFailed
from pgmb.lake.archive import lake_of
from pgmb.lake.care import Keeper, LocalRun
from pgmb.lake.dead import DeadArchiver
from pgmb.lake.storage import Storage
from tests.lake.conftest import COLUMNS, Lake

# The stubs of pyarrow are incomplete.
pafs: Any = pyarrow.fs

pytestmark = [pytest.mark.new_database]

KEYS = ["person-4711", "person-0815"]
SECRETS = [*KEYS, "Name of Customer", "failed for a customer"]


def erase(lake: Lake) -> Erased:
    return Eraser(lake.dsn, KEYS, options=lake.options).erase("request 17")


def keeper(lake: Lake) -> Keeper:
    return Keeper(lake.dsn, "main", run=LocalRun(1), options=lake.options)


def found(lake: Lake) -> dict[str, list[str]]:
    """Where values are: in files of the database, and in any file of the lake's folders."""
    folders = [Path(lake.url), Path(f"{lake.url}_dead")]
    return in_database(lake.db, SECRETS) | in_lake(folders, SECRETS)


def publish(lake: Lake, events: int = 100) -> None:
    """Every tenth event has one of the keys."""
    lake.db.execute(
        "insert into pgmb.log_main (topic, key, payload, headers) select 'order.' || g %% 3,"
        " case when g %% 10 = 0 then (%s::text[])[1 + g / 10 %% 2] else 'key ' || g end,"
        " json_build_object('n', g, 'name', case when g %% 10 = 0 then 'Name of Customer' end),"
        " case when g %% 4 = 0 then json_build_object('name', 'Name of Customer') end"
        " from generate_series(1, %s) g where g %% 4 > 0 or g %% 10 = 0",
        [KEYS, events],
    )


@pytest.fixture
def full(lake: Lake) -> Lake:
    """Events of the keys in segments that are dropped, archived, sealed and open; and dead letters."""
    with pgmb.connect(lake.dsn, max_size=1) as broker:
        broker.create_queue("q", ["order.0"])
        publish(lake)
        lease = broker.receive("q", 100)
        assert lease
        lease.bury([event.seq for event in lease.events if event.key in KEYS], "failed for a customer")
        lease.bury(None, "failed")
    seal(lake.db)
    lake.archive()
    list(DeadArchiver(lake.dsn, "main").archive())
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '1 hour', drop_unread => true)")
    lake.age()
    assert lake.dropped() == [0]
    publish(lake)
    seal(lake.db)
    lake.archive()
    publish(lake)
    seal(lake.db)
    publish(lake)
    return lake


def events(lake: Lake) -> list[tuple[Any, ...]]:
    """Every event, from the lake and the log, as the client reads it."""
    with pgmb.connect(lake.dsn, max_size=1) as broker:
        return [
            (event.seq, event.id, event.topic, event.published_at, event.key, event.raw, event.raw_headers)
            for event in broker.tail("#", after=broker.earliest(), follow=False)
        ]


def is_right(lake: Lake, before: list[tuple[Any, ...]]) -> None:
    """Whether an erasure has ended, and everything is as it should be."""
    assert found(lake) == {}
    (erasure,) = lake.db.execute("select id, ended_at is not null from pgmb.erasure").fetchall()
    assert erasure[1]
    mark = f'{{"pgmb-erased":"{erasure[0]}"}}'.encode()
    after = events(lake)
    assert [now[:4] for now in after] == [was[:4] for was in before]
    for was, now in zip(before, after, strict=True):
        assert now == ((*was[:4], None, b"null", mark) if was[4] in KEYS else was)
    checked = keeper(lake).verify()
    assert (checked.damaged, checked.segments) == ([], 2)


def test_nothing_is_left_of_a_key_in_log_and_lake(full: Lake) -> None:
    before = events(full)
    gone = [event for event in before if event[4] in KEYS]
    assert len(gone) == 40
    held = found(full)
    assert len([name for name in held if name.endswith(".parquet")]) == 3
    counted = {table.name: table.events for table in Eraser(full.dsn, KEYS).count()}
    assert counted == {"pgmb.log_main": 30, "pgmb.dead": 3, full.url: 20, f"{full.url}_dead": 3}
    assert found(full) == held, "counting changes nothing"
    done = erase(full)
    is_right(full, before)
    rows = {table.name: (table.events, len(table.files)) for table in done.tables}
    assert rows == {
        **{f"pgmb.segment_1_{number}": (10, 0) for number in (1, 2, 3)},
        "pgmb.dead": (3, 0),
        full.url: (20, 2),
        f"{full.url}_dead": (3, 1),
    }
    # What follows finds tombstones to be events like others.
    full.archive()
    assert full.is_exact() is False, "one segment is only in the table"
    assert len(full.stored()) == len(before)
    assert keeper(full).compact(1 << 28).replaced > 1
    assert keeper(full).verify().segments == 4
    full.age()
    full.db.execute("delete from pgmb.archived")
    adopted = keeper(full).adopt()
    assert (adopted.segments, adopted.refused) == ([0, 1, 2, 3], {})
    assert [event[:4] for event in events(full)] == [event[:4] for event in before]
    assert [event[4] for event in events(full)] == [None if was[4] in KEYS else was[4] for was in before]
    assert found(full) == {}
    assert erase(full).tables == [], "there is nothing left"


def test_an_erasure_that_is_killed_again_and_again_is_continued(full: Lake) -> None:
    """`python -m faults lake-erase` kills one after each step."""
    before = events(full)
    for step in ("first segment", "write", "commit", "first rewrite"):
        end_after(full, step)
        assert keeper(full).verify().damaged == [], f"half done, after {step}"
        full.age()
    rows = {table.name: table.events for table in erase(full).tables}
    assert (rows[full.url], rows[f"{full.url}_dead"], rows["pgmb.dead"]) == (20, 3, 3)
    is_right(full, before)


def end_after(lake: Lake, step: str) -> None:
    """By SIGKILL once, otherwise in this process."""
    if step == "commit":
        command = [sys.executable, "-m", "harness.erase", lake.dsn, "--die-after", step, *KEYS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        with pytest.raises(Killed):
            erase_and_die(lake.dsn, KEYS, step, die)
    lake.await_end_of_archivers("pgmb erase")


def die() -> None:
    raise Killed


def test_readers_go_on_when_their_files_are_removed(full: Lake) -> None:
    full.age()
    assert full.dropped() == [0, 1], "two files of the table have to be read"
    before = [event[0] for event in events(full)]
    with pgmb.connect(full.dsn, max_size=2) as broker:
        tail = broker.tail("#", after=broker.earliest(), follow=False)
        seen = [next(tail).seq]
        erase(full)
        seen += [event.seq for event in tail]
    assert seen == before


def test_a_stream_with_a_lake_needs_the_extra_and_others_do_not(lake: Lake) -> None:
    """In a process that cannot import deltalake. Nothing needs Spark."""
    lake.db.execute("select pgmb.create_stream('other')")
    lake.db.execute("select pgmb.publish('t', '1', %s, stream => 'other')", [KEYS[0]])
    publish(lake)
    seal(lake.db)
    lake.archive()
    script = f"""
import sys
for name in {{hidden}}:
    sys.modules[name] = None
from pgmb.erasure import Eraser
print(len(Eraser({lake.dsn!r}, {KEYS!r}, streams=["other"]).erase("r").tables))
print(len(Eraser({lake.dsn!r}, {KEYS!r}).erase("r").tables))
"""

    def run(*hidden: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script.format(hidden=hidden)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = run("deltalake", "pyarrow", "pyspark")
    assert refused.stdout.split() == ["1"], refused.stderr
    assert "MissingExtra: stream main has a lake" in refused.stderr
    assert lake.value("select count(*) from pgmb.erasure") == 1, "nothing was begun"
    done = run("pyspark", "adbc_driver_manager")
    assert done.stdout.split() == ["0", "2"], done.stderr
    assert found(lake) == {}


def test_tables_in_object_storage(dsn: str, db: Any, s3_options: dict[str, str]) -> None:
    lake = Lake(dsn, db, f"s3://{BUCKET}/erased", s3_options)
    publish(lake)
    seal(db)
    lake.archive()
    lake.age()
    assert lake.dropped() == [0]
    erase(lake)
    assert keeper(lake).verify().damaged == []
    storage = Storage.at(lake.url, s3_options).files()
    held = [
        info.path for info in storage.get_file_info(pafs.FileSelector("", recursive=True)) if info.is_file
    ]
    (file,) = [path for path in held if path.endswith(".parquet") and "_delta_log" not in path]
    with storage.open_input_file(file) as source:
        rows = pq.ParquetFile(source).read(columns=["key", "payload"]).to_pylist()
    assert len(rows) == 80
    assert not in_bytes([str(rows).encode()], SECRETS)


def test_an_archiver_that_lost_its_lock_cannot_bring_erased_events_back(full: Lake) -> None:
    """It has written files of the log as it was, and commits them after the erasure."""
    stale = full.archiver()
    lake = lake_of(full.db, "main")
    table = stale.open(lake)
    pending = stale.plan(full.db)
    written, digests = stale.write(lake, pending)
    erase(full)
    with pytest.raises(Exception, match="transaction"):
        stale.commit(lake, table, pending, written, digests)
    assert not [row for row in full.stored() if row[COLUMNS.index("key")] in KEYS]
    full.archive()
    assert keeper(full).verify().damaged == []


def test_a_damaged_table_and_a_busy_archiver_are_reported(full: Lake) -> None:
    busy = full.archiver().archive()
    next(busy)
    with pytest.raises(Conflict, match="an archiver works on stream main"):
        erase(full)
    del busy
    full.await_end_of_archivers()
    content = full.files()[0].read_bytes()
    full.files()[0].unlink()
    with pytest.raises(VerificationFailed, match="cannot be read"):
        erase(full)
    full.files()[0].write_bytes(content)
    erase(full)
    assert found(full) == {}
