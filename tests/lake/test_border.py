"""What a task reads while the border between log and lake moves, and after a rebase. Without a JVM."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pyspark.sql.types import StructType

from pgmb import cli
from pgmb.errors import ForeignTable, HistoryGone
from pgmb.spark.source import partition_read
from pgmb.spark.source.queries import ARROW_SCHEMA, arrow_schema
from pgmb.spark.source.readers import BatchReader
from tests.lake.conftest import Lake

pytestmark = [pytest.mark.new_database]

COLUMNS = StructType()
for _name in ARROW_SCHEMA.names:
    COLUMNS.add(_name, "string")


def planned(lake: Lake, **options: str) -> list[Any]:
    return [part.value for part in BatchReader({"url": lake.dsn, **options}, COLUMNS).partitions()]


def seqs(parts: list[Any]) -> list[int]:
    """In the order in which tasks give them."""
    schema = arrow_schema(COLUMNS.fieldNames())
    found: list[Any] = []
    for part in parts:
        for batch in partition_read.read_partition(part, schema):
            found += batch.column("seq").to_pylist()
    return found


def everything(lake: Lake) -> list[int]:
    return [seq for (seq,) in lake.db.execute("select seq from pgmb.log_main order by seq")]


@pytest.fixture
def filled(lake: Lake) -> Lake:
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    for events in (60, 50, 40):
        lake.publish(events)
    lake.publish(30, sealed=False)
    return lake


def archive_and_drop(lake: Lake) -> None:
    lake.archive()
    lake.db.execute("select pgmb.drop_segments()")


def test_a_part_that_was_planned_as_log_is_found_in_the_lake(filled: Lake) -> None:
    wanted, parts = everything(filled), planned(filled, maxRecordsPerPartition="25")
    assert len(parts) > 5
    archive_and_drop(filled)
    assert filled.dropped() == [0, 1, 2]
    assert seqs(parts) == wanted
    assert seqs(planned(filled)) == wanted


def test_options_choose_the_same_events_in_both_tiers(filled: Lake) -> None:
    moment = filled.value("select min(published_at) from pgmb.segment_1_1")
    choices: list[dict[str, str]] = [
        {"subscribe": "order.1,order.3"},
        {"subscribe": "*.2"},
        {"subscribePattern": "order.[12]$"},
        {"startingTimestamp": moment.isoformat()},
        {"endingTimestamp": (moment + timedelta(microseconds=1)).isoformat()},
        {"maxRecordsPerPartition": "7"},
    ]
    before = [seqs(planned(filled, **options)) for options in choices]
    assert all(0 < len(found) < 180 for found in before[:-1])
    filled.archive()
    assert [seqs(planned(filled, **options)) for options in choices] == before, "archived, and in the log"
    archive_and_drop(filled)
    assert [seqs(planned(filled, **options)) for options in choices] == before


def test_positions_lead_into_the_lake_and_late_commits_are_found_there(lake: Lake, connect: Any) -> None:
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute("insert into pgmb.log_main (topic, payload) values ('late', '1')")
    lake.publish(50, sealed=False)
    position = lake.value("select pgmb.position()::text")
    late.commit()
    lake.publish(20)
    lake.publish(10, sealed=False)
    after = {"startingOffsets": json.dumps({"main": position})}
    upto = {"endingOffsets": json.dumps({"main": position})}
    later, earlier = seqs(planned(lake, **after)), seqs(planned(lake, **upto))
    assert (len(later), len(earlier)) == (31, 50)
    archive_and_drop(lake)
    assert lake.dropped() == [0]
    assert seqs(planned(lake, **after)) == later
    assert seqs(planned(lake, **upto)) == earlier


def test_offsets_of_the_command_line_lead_into_the_lake(
    filled: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGMB_DSN", filled.dsn)

    def starting(at: str) -> dict[str, str]:
        monkeypatch.setattr(sys, "argv", ["pgmb", "lake", "offsets", "--at", at])
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main()
        return {"startingOffsets": capsys.readouterr().out}

    wanted = everything(filled)
    archive_and_drop(filled)
    assert seqs(planned(filled, **starting("earliest"))) == wanted
    assert seqs(planned(filled, **starting("2026-01-01T00:00"))) == wanted
    assert seqs(planned(filled, **starting("latest"))) == []


def before_the_log_is_read(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Do something when a task has looked where its segments are, and before it reads the log."""
    read = partition_read._from_log
    begun: list[bool] = []

    def meanwhile(*given: Any) -> Any:
        if not begun:
            begun.append(True)
            work()
        return read(*given)

    monkeypatch.setattr(partition_read, "_from_log", meanwhile)


@pytest.mark.parametrize("archived_before", [False, True])
def test_a_segment_that_is_dropped_after_the_look_is_found_in_the_lake(
    filled: Lake, monkeypatch: pytest.MonkeyPatch, archived_before: bool
) -> None:
    """With no segment in the lake at the first look, or with one of them."""
    wanted = everything(filled)
    if archived_before:
        filled.db.execute("update pgmb.segment set sealed_at = null where number = 1")
        filled.archive()
        filled.db.execute("update pgmb.segment set sealed_at = now() where number = 1")
    parts = planned(filled)
    before_the_log_is_read(monkeypatch, lambda: archive_and_drop(filled))
    assert sorted(seqs(parts)) == wanted
    assert filled.dropped() == [0, 1, 2]


def test_without_the_lake_dropped_history_is_an_error(filled: Lake) -> None:
    parts = planned(filled, tier="log")
    archive_and_drop(filled)
    with pytest.raises(HistoryGone, match="were dropped by retention"):
        seqs(parts)
    assert len(seqs(planned(filled, tier="log"))) == 30
    # What was never archived is an error with the lake too.
    filled.publish(5)
    parts = planned(filled)
    filled.db.execute("select pgmb.alter_stream('main', archive => false)")
    filled.db.execute("select pgmb.drop_segments()")
    with pytest.raises(HistoryGone):
        seqs(parts)


def test_a_table_that_is_not_there_is_named(filled: Lake) -> None:
    parts = planned(filled)
    filled.archive()
    shutil.rmtree(filled.url)
    with pytest.raises(ForeignTable, match=f"no table at {filled.url}") as refused:
        seqs(parts)
    assert "tier=log" in (refused.value.hint or "")
    assert len(seqs(planned(filled, tier="log"))) == 180


def test_an_archive_that_is_older_than_a_rebase_comes_first_and_once(filled: Lake) -> None:
    wanted = everything(filled)
    filled.archive()
    filled.db.execute("update pgmb.segment set dropped_at = now() where number = 0")
    filled.db.execute("truncate pgmb.segment_1_0")
    filled.db.execute("select pgmb.rebase()")
    position = filled.value("select pgmb.position()::text")
    assert seqs(planned(filled)) == wanted
    filled.publish(10)
    more = [seq for seq in everything(filled) if seq > wanted[-1]]
    later = {"startingOffsets": json.dumps({"main": position})}
    assert seqs(planned(filled, **later)) == more, "nothing of the archive comes again"
    archive_and_drop(filled)
    assert seqs(planned(filled)) == [*wanted, *more]
    assert seqs(planned(filled, **later)) == more
