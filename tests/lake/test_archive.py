"""Sealed segments reach the table exactly once, and the log keeps them until the table was read back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from harness.lake import Here
from harness.segments import seal
from pgmb.errors import Conflict, ForeignTable, VerificationFailed
from pgmb.lake.archive import Pending, divide
from pgmb.lake.delta import KnownFile, overlapping
from tests.lake.conftest import DB, Lake

pytestmark = [pytest.mark.new_database]


def test_each_sealed_event_is_in_the_table_once_as_the_log_has_it(lake: Lake) -> None:
    lake.publish(1000)
    lake.publish(0)
    lake.publish(500)
    lake.publish(100, sealed=False)
    (done,) = lake.archive()
    assert (done.segments, done.events, done.adopted) == ([0, 1, 2], 1500, False)
    assert len(lake.logged()) == 1500
    assert lake.is_exact()
    assert lake.archive() == []
    seal(lake.db)
    assert [one.segments for one in lake.archive()] == [[3]]
    assert lake.is_exact()
    assert lake.value("select count(*) from pgmb.segment where archived_at is not null") == 4


def test_files_are_divided_by_date_sorted_and_keep_keys_out_of_the_tables_log(lake: Lake) -> None:
    lake.publish(300, sealed=False)
    # Not in the order of seq, as clocks of several sessions are.
    lake.db.execute(
        "update pgmb.log_main"
        " set published_at = timestamptz '2026-01-31 23:59:59.5+00' + seq % 3 * interval '1 second'"
    )
    seal(lake.db)
    (done,) = lake.archive()
    assert done.files == 2
    assert lake.is_exact()
    for file in lake.files():
        stored: Any = pq.ParquetFile(file)
        seqs = stored.read().column("seq").to_pylist()
        assert seqs == sorted(seqs)
        assert {at.date().isoformat() for at in stored.read().column("published_at").to_pylist()} == {
            file.parent.name.removeprefix("date=")
        }
        assert stored.metadata.row_group(0).column(0).compression == "ZSTD"
        encodings = {
            column.path_in_schema: column.encodings
            for column in (stored.metadata.row_group(0).column(n) for n in range(8))
        }
        for name in ("seq", "xid", "published_at"):
            assert "DELTA_BINARY_PACKED" in encodings[name]
    log = "".join(path.read_text() for path in (Path(lake.url) / "_delta_log").glob("*.json"))
    assert not any(key in log for key in ("ключ", json.dumps("ключ")[1:-1], "é", "trace"))
    assert "order.0" in log
    pruned = lake.table().file_uris(file_pruning_predicate="published_at < '2026-02-01T00:00:00Z'")
    assert len(pruned) == 1
    assert "date=2026-01-31" in pruned[0]


def test_files_end_at_their_size(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    # A row group is what a file grows by; of this size a test has several.
    monkeypatch.setattr("pgmb.lake.task.ROW_GROUP", 500)
    lake.publish(2100)
    (done,) = lake.archive(file_bytes=1)
    assert (done.events, done.files) == (2100, 5)
    assert lake.is_exact()
    lake.publish(1200)
    (done,) = lake.archive()
    assert (done.events, done.files) == (1200, 1)
    (large,) = [file for file in map(pq.ParquetFile, lake.files()) if file.metadata.num_rows == 1200]
    assert [large.metadata.row_group(n).num_rows for n in range(3)] == [500, 500, 200]


MEGA = 1024 * 1024


def pending(segment: int, megabytes: float, events: int | None = 1_000_000) -> Pending:
    lo = (segment << 40) - 1
    hi = None if events is None else lo + events
    return Pending(segment, lo, hi, int(megabytes * MEGA), datetime(2026, 1, 31, tzinfo=UTC))


@pytest.mark.parametrize(
    ("sizes", "parallelism", "parts"),
    [
        ([430, 429.9, 430.1, 430], 2, 2),  # the sizes of equal segments differ a little
        ([100, 100, 100], 2, 2),
        ([200, 1, 1, 1], 4, 4),
        ([1, 1, 1, 200], 4, 4),
        ([5, 5], 4, 1),
        ([40], 4, 2),
        ([3000, 3000], 2, 6),
        ([900], 1, 1),
    ],
)
def test_tasks_get_equal_parts_cut_between_blocks(sizes: list[float], parallelism: int, parts: int) -> None:
    segments = [pending(number, size) for number, size in enumerate(sizes, 3)]
    ranges = divide([*segments, pending(9, 0, None)], parallelism)
    assert ranges[0][0] == segments[0].lo
    assert ranges[-1][1] == segments[-1].hi
    assert [lo for lo, _ in ranges[1:]] == [hi for _, hi in ranges[:-1]]
    assert all((lo + 1) % 4096 == 0 for lo, _ in ranges)
    assert len(ranges) == parts

    def megabytes(lo: int, hi: int) -> float:
        shares = (max(0, min(hi, one.hi or 0) - max(lo, one.lo)) / 1_000_000 for one in segments)
        return sum(share * size for share, size in zip(shares, sizes, strict=True))

    held = [megabytes(*one) for one in ranges]
    assert max(held) <= 1.05 * sum(sizes) / parts
    assert max(held) <= 1024 * 1.05


def test_segments_without_events_are_nobodys_part() -> None:
    assert divide([pending(1, 0, None)], 4) == []


def test_files_with_blocks_in_common_are_read_together() -> None:
    files = [KnownFile("a", 1, 0, 4095), KnownFile("b", 1, 4096, 8000), KnownFile("c", 1, 8001, 9000),
             KnownFile("d", 1, 5000, 5001), KnownFile("e", 1, 20000, 20001)]  # fmt: skip
    assert [[file.path for file in group] for group in overlapping(files)] == [["a"], ["b", "d", "c"], ["e"]]
    assert list(overlapping([])) == []


def test_commits_end_at_their_size_and_a_run_takes_all(lake: Lake) -> None:
    for _ in range(3):
        lake.publish(50)
    assert [one.segments for one in lake.archive(commit_bytes=1)] == [[0], [1], [2]]
    assert lake.is_exact()


# -- Retention -----------------------------------------------------------------------------------------------


def test_retention_drops_what_was_verified_and_nothing_else(lake: Lake) -> None:
    lake.publish(100)
    lake.age()
    assert lake.dropped() == [], "not archived"
    lake.archive()
    lake.publish(100)
    lake.age()
    assert lake.dropped() == [0]
    lake.archive()
    assert lake.dropped() == [0]
    lake.db.execute("select pgmb.drop_segments()")
    assert lake.dropped() == [0, 1]
    assert len(lake.stored()) == 200


def test_the_log_keeps_what_is_archived_for_as_long_as_asked(lake: Lake) -> None:
    lake.publish(100)
    lake.archive()
    lake.db.execute("select pgmb.drop_segments()")
    assert lake.dropped() == [], "the segment is younger than an hour"
    lake.age()
    assert lake.dropped() == [0]


# -- Damage --------------------------------------------------------------------------------------------------


def damaged(lake: Lake, break_file: Any) -> None:
    """Two segments, of which a file is broken between commit and verification."""
    lake.publish(500)
    lake.publish(0)
    archiver = lake.archiver()
    verify = archiver.verify

    def broken(*given: Any) -> Any:
        break_file(lake.files()[0])
        return verify(*given)

    archiver.verify = broken  # type: ignore[method-assign]
    with pytest.raises(VerificationFailed, match="segment 0"):
        list(archiver.archive())
    lake.age()
    assert lake.dropped() == [], "the drop is blocked"
    # The next run finds it again, and reports it again.
    with pytest.raises(VerificationFailed) as again:
        lake.archive()
    assert "--repair" in (again.value.hint or "")
    lake.age()
    assert lake.dropped() == []
    (done,) = lake.archive(repair=True)
    assert (done.events, done.adopted) == (500, True)
    assert lake.is_exact()
    lake.age()
    assert lake.dropped() == [0, 1]


def test_a_missing_file_blocks_the_drop(lake: Lake) -> None:
    damaged(lake, lambda file: file.unlink(missing_ok=True))


def test_a_damaged_file_blocks_the_drop(lake: Lake) -> None:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    damaged(lake, flip)


def test_a_file_with_other_events_blocks_the_drop(lake: Lake) -> None:
    """Sound Parquet with as many rows: only the digest tells."""

    def replace(file: Path) -> None:
        table = pq.read_table(file, partitioning=None)
        changed = table.column("payload").to_pylist()
        changed[17] = '{"n": 0}'
        place = table.schema.get_field_index("payload")
        import pyarrow as pa

        pq.write_table(table.set_column(place, table.schema.field(place), pa.array(changed)), file)

    damaged(lake, replace)


def test_a_segment_that_is_in_the_table_twice_is_not_recorded(lake: Lake) -> None:
    lake.publish(200)
    archiver = lake.archiver()
    write = archiver.write

    def twice(*given: Any) -> Any:
        files, digests = write(*given)
        more, _ = write(*given)
        return files + more, digests

    archiver.write = twice  # type: ignore[method-assign]
    with pytest.raises(VerificationFailed, match="200 events in the log and 400 in the table"):
        list(archiver.archive())
    lake.age()
    assert lake.dropped() == []


# -- Whose table it is ---------------------------------------------------------------------------------------


def test_another_streams_table_is_refused(lake: Lake) -> None:
    from pgmb.lake.archive import init

    lake.db.execute("select pgmb.create_stream('other')")
    with pytest.raises(Conflict, match="would lie in the folder"):
        init(lake.dsn, "other", lake.url)
    assert lake.value("select count(*) from pgmb.lake") == 1
    assert lake.value("select archive from pgmb.stream where name = 'other'") is False


def test_a_table_that_lost_what_was_verified_is_refused(lake: Lake, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(lake.url, tmp_path / "older")
    lake.publish(10)
    lake.archive()
    shutil.rmtree(lake.url)
    with pytest.raises(ForeignTable, match="no table"):
        lake.archive()
    shutil.copytree(tmp_path / "older", lake.url)
    lake.publish(10)
    with pytest.raises(ForeignTable, match="segment 0 was verified"):
        lake.archive()


def test_late_commits_are_archived_with_their_segment(lake: Lake, connect: Any) -> None:
    """A segment is archived only when no transaction can add to it, and none is passed over."""
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute("insert into pgmb.log_main (topic, payload) values ('late', '1')")
    lake.publish(20, sealed=False)
    row: Any = lake.db.execute("select pgmb.rotate()").fetchone()
    assert row == (1,)
    lake.db.execute("select pgmb.seal()")
    fillers: DB = connect()
    fillers.execute("insert into pgmb.log_main (topic, payload) values ('next', '2')")
    assert lake.archive() == [], "segment 0 has a writer"
    late.commit()
    lake.db.execute("select pgmb.seal()")
    (done,) = lake.archive()
    assert (done.segments, done.events) == ([0], 21)
    assert lake.is_exact()


def test_segments_that_were_sealed_out_of_order_wait_for_those_before_them(lake: Lake) -> None:
    for _ in range(3):
        lake.publish(10)
    lake.db.execute("update pgmb.segment set sealed_at = null where number = 1")
    assert [one.segments for one in lake.archive()] == [[0]]
    lake.db.execute("update pgmb.segment set sealed_at = now() where number = 1")
    assert [one.segments for one in lake.archive()] == [[1, 2]]
    assert lake.is_exact()


def test_of_two_archivers_one_waits_for_nothing_and_does_nothing(lake: Lake) -> None:
    lake.publish(100)
    first = lake.archiver().archive()
    assert next(first).segments == [0]
    lake.publish(100)
    assert lake.archive() == [], "the first one holds the lock until it has finished"
    assert [one.segments for one in first] == [[1]]


@pytest.mark.parametrize("commit_bytes", [1 << 40, 1], ids=["the same", "fewer"])
def test_archivers_that_plan_the_same_segments_commit_them_once(lake: Lake, commit_bytes: int) -> None:
    """Without the lock, which only saves work. The other one commits both segments, or only the first."""
    lake.publish(300)
    lake.publish(100)

    class Unlocked(Here):
        """Another archiver writes and commits while the tasks of the first one run."""

        def __init__(self) -> None:
            self.others = 0

        def __call__(self, work: Any, tasks: Any, result: Any) -> Any:
            done = super().__call__(work, tasks, result)
            if self.others == 0:
                self.others = 1
                other = lake.archiver(commit_bytes=commit_bytes)
                other.unlocked = True
                assert 0 in next(iter(other.archive())).segments
            return done

    run = Unlocked()
    rest = [one.segments for one in lake.archive(run)]
    assert rest == ([] if commit_bytes > 1 else [[1]]), "the other was first, and has recorded its own"
    assert run.others == 1
    assert lake.is_exact()
    assert len(list(Path(lake.url).rglob("*.parquet"))) > len(lake.files()), "the loser's belong to no table"
