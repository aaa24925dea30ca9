"""What was verified can be read again, small files joined, old ones removed, and the manifest rebuilt."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from psycopg.conninfo import make_conninfo

import pgmb
from pgmb.doctor import examine
from pgmb.errors import Conflict, VerificationFailed
from pgmb.lake.care import Keeper, LocalRun, small_files
from pgmb.lake.delta import KnownFile
from tests.lake.conftest import Lake
from tests.lake.test_cli import Run, pgmb_lake  # noqa: F401

pytestmark = [pytest.mark.new_database]


@pytest.fixture
def keeper(lake: Lake) -> Keeper:
    return Keeper(lake.dsn, "main", run=LocalRun(1), options=lake.options)


@pytest.fixture
def archived(lake: Lake) -> Lake:
    """Three archived segments, each in a file of its own."""
    for _ in range(3):
        lake.publish(100)
        lake.archive()
    return lake


def of_segment(lake: Lake, number: int) -> Path:
    for file in lake.files():
        if pq.ParquetFile(file).read(columns=["seq"]).column("seq")[0].as_py() >> 40 == number:
            return file
    raise AssertionError(number)


def reasons(lake: Lake) -> dict[int, tuple[str, str]]:
    rows = lake.db.execute("select segment, state, reason from pgmb.describe_lake_segments() order by 1")
    return {segment: (state, reason) for segment, state, reason in rows}


# -- Verify --------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=["corrupted", "missing"])
def test_damage_after_the_verification_is_found_and_blocks_the_drop(
    archived: Lake, keeper: Keeper, damage: Any
) -> None:
    found = keeper.verify()
    assert (found.segments, found.events, found.damaged) == (3, 300, [])
    name = of_segment(archived, 1).name
    damage(of_segment(archived, 1))
    found = keeper.verify()
    assert (found.segments, [(one.segment, one.kept) for one in found.damaged]) == (2, [(1, True)])
    assert name in found.damaged[0].failure
    archived.age()
    assert archived.dropped() == [0], "segment 1 is damaged, and 2 comes after it"
    state, reason = reasons(archived)[1]
    assert state == "sealed"
    assert reason.startswith("verification failed: ")
    assert name in reason
    (verdict,) = [one for one in examine(archived.db) if one.check == "lake"]
    assert (verdict.problem, "--repair" in (verdict.fix or "")) == (True, True)
    archived.archive(repair=True)
    assert len(archived.stored()) == 300
    assert keeper.verify().damaged == []
    archived.age()
    assert archived.dropped() == [0, 1, 2]


def test_damage_of_a_dropped_segment_is_known_until_it_is_repaired(archived: Lake, keeper: Keeper) -> None:
    archived.age()
    assert archived.dropped() == [0, 1, 2]
    whole = of_segment(archived, 2).read_bytes()
    flip(of_segment(archived, 2))
    (damage,) = keeper.verify().damaged
    assert (damage.segment, damage.kept) == (2, False)
    assert reasons(archived)[2][0] == "damaged"
    (verdict,) = [one for one in examine(archived.db) if one.check == "lake"]
    assert verdict.level == "fail"
    assert archived.archive() == []
    told = make_conninfo(archived.dsn, options="-c pgmb.read_damaged=on")
    for dsn, message in ((archived.dsn, "segment 2 of stream main is damaged"), (told, "cannot be read")):
        with pgmb.connect(dsn) as broker, pytest.raises(VerificationFailed, match=message):
            list(broker.tail(after=broker.earliest(), follow=False))
    of_segment(archived, 2).write_bytes(whole)
    assert keeper.verify().damaged == []
    assert 2 not in reasons(archived)
    (verdict,) = [one for one in examine(archived.db) if one.check == "lake"]
    assert verdict.level == "ok"


def test_only_segments_since_a_time_are_read(archived: Lake, keeper: Keeper) -> None:
    archived.db.execute("update pgmb.segment set closed_at = closed_at - interval '1 day' where number < 2")
    of_segment(archived, 0).unlink()
    found = keeper.verify(archived.value("select now() - interval '1 hour'"))
    assert (found.segments, found.damaged) == (1, [])
    assert [one.segment for one in keeper.verify().damaged] == [0]


# -- Compact and vacuum --------------------------------------------------------------------------------------


def test_small_files_are_joined_and_hold_the_same_events(archived: Lake, keeper: Keeper) -> None:
    before, version = archived.stored(), archived.table().version()
    files = archived.files()
    done = keeper.compact(1 << 28)
    assert (done.replaced, done.files) == (3, 1)
    assert len(archived.files()) == 1
    assert archived.stored() == before
    assert keeper.verify().events == 300
    assert keeper.compact(1 << 28).replaced == 0
    archived.publish(50)
    archived.archive()
    assert len(archived.stored()) == 350
    assert (
        archived.table().transaction_version(archived.value("select source from pgmb.lake_of('main')")) == 3
    )
    assert keeper.vacuum(24) == [], "readers may use files of a version of the last day"
    assert {Path(name).name for name in keeper.vacuum(0, dry_run=True)} == {file.name for file in files}
    assert all(file.exists() for file in files)
    assert len(keeper.vacuum(0)) == 3
    assert not any(file.exists() for file in files)
    assert len(archived.stored()) == 350
    assert version < archived.table().version()


def test_a_damaged_file_is_not_joined(archived: Lake, keeper: Keeper) -> None:
    flip(of_segment(archived, 1))
    files = archived.files()
    with pytest.raises(VerificationFailed, match="cannot be joined"):
        keeper.compact(1 << 28)
    assert archived.files() == files


def test_files_of_a_killed_archiver_are_removed(archived: Lake, keeper: Keeper) -> None:
    stray = of_segment(archived, 0).with_name(f"0-{uuid.uuid4()}.parquet")
    shutil.copy(of_segment(archived, 0), stray)
    assert [Path(name).name for name in keeper.vacuum(0)] == [stray.name]
    assert not stray.exists()


def test_vacuum_leaves_files_that_pgmb_did_not_write(archived: Lake, keeper: Keeper) -> None:
    """Notes, other tables, files under other names and beside the partitions: they may be the only copy."""
    inside = of_segment(archived, 0).parent
    own = f"0-{uuid.uuid4()}.parquet"
    kept = [
        *(inside / name for name in ("stray.parquet", "notes.txt", f"{own}.crc", f"part-{own}")),
        *(Path(archived.url) / name for name in ("README", own, f"audit/date=2026-01-01/{own}")),
        Path(archived.url) / "audit/_delta_log/00000000000000000000.json",
    ]
    for file in kept:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not pgmb's")
    removed = inside / own
    removed.write_text("of a killed archiver")
    replaced = archived.files()
    keeper.compact(1 << 28)
    names = sorted([removed.name, *(file.name for file in replaced)])
    assert sorted(Path(name).name for name in keeper.vacuum(0, dry_run=True)) == names
    assert removed.exists()
    assert sorted(Path(name).name for name in keeper.vacuum(0)) == names
    assert not removed.exists()
    assert [file for file in kept if not file.exists()] == []
    assert archived.is_exact()


def test_files_are_grouped_by_date_and_size() -> None:
    sizes = [("a", 10), ("a", 20), ("b", 10), ("a", 90), ("a", 30), ("a", 30), ("a", 60), ("b", 5)]
    files = [KnownFile(f"date={day}/{n}", size, n * 10, n * 10 + 9) for n, (day, size) in enumerate(sizes)]
    groups = [[int(file.path[-1]) for file in group] for group in small_files(files, 100)]
    assert sorted(groups) == [[0, 1], [2, 7], [4, 5]]


def test_care_waits_for_no_archiver(archived: Lake, keeper: Keeper) -> None:
    archived.publish(10)
    busy = archived.archiver().archive()
    next(busy)
    for work in (lambda: keeper.compact(1), lambda: keeper.vacuum(0), keeper.adopt):
        with pytest.raises(Conflict, match="an archiver works"):
            work()


# -- Adopt ---------------------------------------------------------------------------------------------------


def test_a_lost_manifest_is_rebuilt_from_the_table(archived: Lake, keeper: Keeper) -> None:
    archived.db.execute(
        "update pgmb.segment set closed_at = closed_at - interval '2 hours',"
        " last_published_at = last_published_at - interval '2 hours' where number < 2"
    )
    archived.db.execute("select pgmb.drop_segments()")
    assert archived.dropped() == [0, 1]
    known = archived.db.execute(
        "delete from pgmb.archived returning segment, epoch, events, digest, max_xid"
    ).fetchall()
    archived.db.execute("update pgmb.segment set archived_at = null where dropped_at is null")
    done = keeper.adopt()
    assert (done.segments, done.refused) == ([0, 1, 2], {})
    again = archived.db.execute("select segment, epoch, events, digest, max_xid from pgmb.archived")
    assert sorted(again.fetchall()) == sorted(known)
    assert keeper.verify().events == 300
    assert keeper.adopt().segments == []


def test_what_the_table_does_not_hold_as_committed_is_not_adopted(archived: Lake, keeper: Keeper) -> None:
    archived.age()
    archived.db.execute("delete from pgmb.archived")
    of_segment(archived, 1).unlink()
    done = keeper.adopt()
    assert (done.segments, list(done.refused)) == ([0, 2], [1])


# -- Status --------------------------------------------------------------------------------------------------


def test_status_says_what_a_segment_waits_for(lake: Lake, pgmb_lake: Run, connect: Any) -> None:  # noqa: F811
    writer: psycopg.Connection[Any] = connect(autocommit=False)
    lake.db.execute("select pgmb.create_queue('slow', '{#}')")
    assert pgmb_lake("status", "--max-lag", "0s")[0] == 0, "there is no event"
    lake.publish(10)
    assert reasons(lake) == {0: ("sealed", "waits for pgmb lake archive")}
    # Notes that no transaction is open that could not see the next segment.
    lake.db.execute("select pgmb.maintain()")
    writer.execute("set application_name = 'importer'")
    writer.execute("select pgmb.publish('t', '1')")
    lake.db.execute("select pgmb.rotate()")
    lake.db.execute("select pgmb.seal()")
    state, reason = reasons(lake)[1]
    assert state == "closed"
    assert f"process {writer.info.backend_pid} " in reason
    assert "importer, idle in transaction since" in reason
    code, _, said = pgmb_lake("status", "--max-lag", "0s")
    assert code == 1
    assert "the lake of stream main is" in said
    assert "segment 0 waits for pgmb lake archive" in said
    assert pgmb_lake("status", "--max-lag", "2h")[0] == 0
    lake.archive()
    assert reasons(lake)[0][1].startswith("kept until ")
    code, _, said = pgmb_lake("status", "--max-lag", "0s")
    assert (code, "segment 1 transactions that may write to it are open" in said) == (1, True)
    writer.commit()
    lake.db.execute("select pgmb.seal()")
    lake.archive()
    lake.age()
    assert lake.dropped() == []
    assert reasons(lake)[0] == ("archived", "held by queue slow")
    (shown,) = json.loads(pgmb_lake("status", "--json")[1])
    assert (shown["lag"], [one["reason"] for one in shown["segments"]]) == (None, ["held by queue slow"] * 2)
    assert "held by queue slow" in pgmb_lake("status")[1]
    lake.publish(5, sealed=False)
    code, _, said = pgmb_lake("status", "--max-lag", "0s")
    assert (code, "no janitor rotates it" in said) == (1, True), said


def test_the_commands_of_care(archived: Lake, pgmb_lake: Run) -> None:  # noqa: F811
    assert pgmb_lake("verify", "--since", "1d")[:2] == (0, "main: 3 segments with 300 events are sound.\n")
    assert pgmb_lake("compact", "--target", "1MB")[1].startswith("main: joined 3 files of ")
    assert pgmb_lake("compact")[1] == "main: no small files to join.\n"
    assert pgmb_lake("vacuum")[1] == "main: 0 files removed.\n"
    assert pgmb_lake("vacuum", "--keep", "0s", "--dry-run")[1].endswith("main: 3 files to remove.\n")
    assert len(json.loads(pgmb_lake("vacuum", "--keep", "0s", "--json")[1])) == 3
    assert pgmb_lake("adopt")[1] == "main: adopted 0 segments.\n"
    archived.files()[0].unlink()
    code, said, error = pgmb_lake("verify")
    assert (code, "the log keeps it" in said, "--repair" in error) == (1, True, True)
    for words in (["compact", "--target", "big"], ["verify", "--since", "latest"]):
        assert pgmb_lake(*words)[0] == 2
