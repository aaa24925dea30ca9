"""The Python client reads log and lake as one stream: the same events and positions in both."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars
import psycopg
import pytest

import pgmb
from pgmb import Broker, Event, LakeAccess, Position, cli
from pgmb._core.cursor import ReadCursor
from pgmb.errors import (
    ForeignTable,
    HistoryGone,
    InvalidArgument,
    MissingExtra,
    PositionLost,
    VerificationFailed,
)
from tests.lake.conftest import DB, Lake

pytestmark = [pytest.mark.new_database]


@pytest.fixture
def filled(lake: Lake) -> Lake:
    """Three sealed segments and an open one, all due to be dropped once they are archived."""
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    for events in (60, 50, 40):
        lake.publish(events)
    lake.publish(30, sealed=False)
    return lake


@pytest.fixture
def broker(lake: Lake) -> Any:
    with pgmb.connect(lake.dsn, max_size=2) as connected:
        yield connected


def archive_and_drop(lake: Lake) -> None:
    lake.archive()
    lake.db.execute("select pgmb.drop_segments()")


def row(event: Event) -> tuple[Any, ...]:
    headers = None if event.raw_headers is None else event.raw_headers.decode()
    return (
        event.seq,
        str(event.id),
        event.topic,
        event.key,
        event.raw.decode(),
        headers,
        event.published_at,
        event.stream,
        event.attempt,
    )


def rows(broker: Broker, **options: Any) -> list[tuple[Any, ...]]:
    with broker.tail(follow=False, **{"after": broker.earliest(), **options}) as events:
        return [row(event) for event in events]


def test_a_tail_and_pages_are_the_same_before_and_after_history_was_dropped(
    filled: Lake, broker: Broker
) -> None:
    earliest, upto = broker.earliest(), broker.position()
    before = rows(broker)
    assert len(before) == 180
    archive_and_drop(filled)
    assert filled.dropped() == [0, 1, 2]
    assert rows(broker) == before
    assert [row(event) for event in broker.between("main", earliest, upto)] == before
    found: list[Any] = []
    while page := broker.between("main", earliest, upto, found[-1][0] if found else 0, 7):
        assert len(page) == min(7, 180 - len(found)), "a page is full unless it is the last"
        found += [row(event) for event in page]
    assert found == before
    assert len(rows(broker, lake=False)) == 30
    assert len(broker.between("main", earliest, upto, lake=False)) == 30


def test_every_position_leads_to_the_same_events_in_both_tiers(
    lake: Lake, broker: Broker, connect: Any
) -> None:
    """Those between events, of a batch that was under way, and with transactions that ended late."""
    lake.db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    cursors: list[ReadCursor | Position] = [broker.earliest()]
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute("insert into pgmb.log_main (topic, payload) values ('late', '1')")
    for events in (5, 6):
        lake.publish(events, sealed=False)
        cursors.append(broker.position())
    late.commit()
    lake.publish(4)
    cursors.append(broker.position())
    lake.publish(9)
    with broker.tail(after=cursors[0], follow=False) as tail:
        for number, _ in enumerate(tail):
            if number in (0, 7, 15, 19):
                assert tail.position is not None
                cursors.append(tail.position)
    wanted = [[row(e) for e in broker.tail(after=one, follow=False)] for one in cursors]
    assert [len(one) for one in wanted] == [25, 20, 14, 9, 24, 17, 9, 5]
    archive_and_drop(lake)
    assert lake.dropped() == [0, 1]
    assert lake.value("select count(*) from pgmb.log_main") == 0
    again = [ReadCursor.parse(str(one)) for one in cursors]
    assert [[row(e) for e in broker.tail(after=one, follow=False)] for one in again] == wanted
    # And between each two of them.
    places = [one for one in cursors if isinstance(one, Position)]
    for first, second in pairwise(places):
        pages = broker.between("main", first, second)
        assert [row(event)[0] for event in pages] == [
            one[0] for one in wanted[cursors.index(first)] if one not in wanted[cursors.index(second)]
        ]


def test_filters_and_patterns_choose_the_same_events_in_both_tiers(filled: Lake, broker: Broker) -> None:
    choices: list[dict[str, Any]] = [
        {"equals": {"key": "ключ-4"}},
        {"filter": "$.payload.n < $most", "params": {"most": 70}},
        {"equals": {"payload": {"n": 3}}},
        {"filter": "exists ($.headers.trace)"},
    ]
    patterns = [("order.3",), ("*.1", "order.2"), ("nothing.#",)]

    def chosen() -> list[Any]:
        by_filter = [rows(broker, **one) for one in choices]
        return by_filter + [
            [row(e) for e in broker.tail(*one, after=broker.earliest(), follow=False)] for one in patterns
        ]

    before = chosen()
    assert all(0 < len(found) < 180 for found in before[:-1])
    archive_and_drop(filled)
    assert chosen() == before
    with pytest.raises(InvalidArgument, match="filter"):
        rows(broker, filter="$.payload.n <")


def test_a_time_leads_into_the_lake(filled: Lake, broker: Broker) -> None:
    times = [
        filled.value(f"select min(published_at) from pgmb.segment_1_{number}") for number in (0, 1, 2, 3)
    ]
    before = rows(broker)
    archive_and_drop(filled)
    for at in (*times, times[2] + timedelta(microseconds=1), datetime(2026, 1, 1, tzinfo=UTC)):
        assert rows(broker, after=None, since=at) == [one for one in before if one[6] >= at]
    assert filled.db.execute("select pgmb.seq_at('main', %s) >> 40", [times[2]]).fetchall() == [(1,)]
    with pytest.raises(InvalidArgument, match="time zone"):
        broker.tail(since=datetime(2026, 1, 1))  # noqa: DTZ001 - that is refused


@pytest.mark.parametrize("look", ["between", "since"])
def test_the_command_line_reaches_archived_history(
    filled: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], look: str
) -> None:
    monkeypatch.setenv("PGMB_DSN", filled.dsn)

    def tail(*given: str) -> list[int]:
        monkeypatch.setattr(sys, "argv", ["pgmb", "tail", "--no-follow", "--json", *given])
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            cli.main()
        return [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()]

    wanted = [seq for (seq,) in filled.db.execute("select seq from pgmb.log_main order by seq")]
    archive_and_drop(filled)
    given = ["--from", "2025-01-01"] if look == "since" else ["--since", "earliest"]
    assert tail(*given) == wanted
    assert tail(*given, "--no-lake") == wanted[-30:]
    assert tail(*given, "order.3") == [
        seq for seq, topic in zip(wanted, _topics(filled), strict=True) if topic == "order.3"
    ]


def _topics(lake: Lake) -> list[str]:
    stored = [event[3] for event in lake.stored()]
    return stored + [topic for (topic,) in lake.db.execute("select topic from pgmb.log_main order by seq")]


def test_a_segment_that_is_dropped_while_the_log_is_read_is_found_in_the_lake(
    filled: Lake, connect: Any
) -> None:
    """In the same statement: the function has its events before it learns that they are gone."""
    reader: DB = connect()
    other: DB = connect()
    earliest, upto = (filled.value(f"select pgmb.{name}()::text") for name in ("earliest", "position"))
    filled.archive()
    # The reader is held up where it wants to read the log's segment 1, which is dropped meanwhile.
    with other.transaction():
        other.execute("lock table pgmb.segment_1_0 in access exclusive mode")
        pid = reader.info.backend_pid
        found: list[Any] = []
        statement = (
            "select e.seq, null::bigint from pgmb.between('main', %(after)s, %(upto)s, lake => true) e"
            " union all"
            " select null, l.segment from pgmb.lake_between('main', %(after)s, %(upto)s) l"
        )
        thread = threading.Thread(
            target=lambda: found.extend(reader.execute(statement, {"after": earliest, "upto": upto}))
        )
        thread.start()
        while not filled.value(f"select cardinality(pg_blocking_pids({pid}))"):
            pass
        other.execute("set local lock_timeout = 0")
        other.execute("truncate pgmb.segment_1_0")
        other.execute("update pgmb.segment set dropped_at = now() where number = 0")
    thread.join()
    assert [segment for _, segment in found if segment is not None] == [0]


def test_the_border_moves_between_the_pages_of_a_reader(
    filled: Lake, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgmb._sync.tail._PAGE_EVENTS", 7)
    before = rows(broker)
    found: list[Any] = []
    with broker.tail(after=broker.earliest(), follow=False) as events:
        for number, event in enumerate(events):
            found.append(row(event))
            if number == 20:
                archive_and_drop(filled)
    assert found == before
    assert filled.dropped() == [0, 1, 2]


def test_positions_of_archived_history_are_proven(filled: Lake, broker: Broker) -> None:
    """A position that a failover lost names a tick that is not there: its transaction ids are others'."""
    filled.db.execute("select pgmb.tick()")
    good = broker.position()
    filled.publish(5)
    forged = Position.parse(str(good).replace(f",{good.proof},", f",{good.proof + 1},"))
    assert forged != good
    with pytest.raises(PositionLost):
        broker.between("main", forged, broker.position())
    archive_and_drop(filled)
    assert filled.value("select count(*) from pgmb.tick") <= 1
    assert len(broker.between("main", good, broker.position())) == 5
    with pytest.raises(PositionLost, match="has no such tick"):
        broker.between("main", forged, broker.position())
    with pytest.raises(PositionLost):
        broker.between("main", broker.earliest(), forged)
    with pytest.raises(HistoryGone):
        broker.between("main", good, broker.position(), lake=False)


def test_what_neither_tier_has_is_an_error(filled: Lake, broker: Broker) -> None:
    filled.db.execute("select pgmb.alter_stream('main', archive => false)")
    position = broker.position()
    filled.publish(3)
    filled.db.execute("select pgmb.drop_segments()")
    assert filled.dropped() == [0, 1, 2, 3]
    with pytest.raises(HistoryGone):
        broker.between("main", position, broker.position())
    # The beginning is where history begins that is kept.
    filled.publish(4)
    filled.publish(6, sealed=False)
    assert len(rows(broker)) == 10
    filled.db.execute("select pgmb.alter_stream('main', archive => true)")
    archive_and_drop(filled)
    assert filled.dropped() == [0, 1, 2, 3, 4]
    assert len(rows(broker)) == 10
    # A gap is not.
    filled.publish(0)
    filled.db.execute("select pgmb.alter_stream('main', archive => false)")
    filled.db.execute("select pgmb.drop_segments()")
    filled.publish(2, sealed=False)
    with pytest.raises(HistoryGone):
        rows(broker)


def test_a_table_that_lacks_events_is_an_error(filled: Lake, broker: Broker, tmp_path: Path) -> None:
    filled.archive()
    copy = tmp_path / "older"
    shutil.copytree(filled.url, copy)
    filled.publish(20)
    archive_and_drop(filled)
    with pytest.raises(ForeignTable, match="is at version"):
        rows(broker, lake=LakeAccess(url=str(copy)))
    moved = tmp_path / "elsewhere"
    shutil.move(filled.url, moved)
    with pytest.raises(ForeignTable, match="no table at"):
        rows(broker)
    assert len(rows(broker, lake=LakeAccess(url=str(moved)))) == 200
    [*_, last] = sorted(moved.glob("date=*/*.parquet"))
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(VerificationFailed, match=last.name):
        rows(broker, lake=LakeAccess(url=str(moved)))
    last.write_bytes(kept)
    filled.db.execute("update pgmb.archived set events = events + 1 where segment = 1")
    with pytest.raises(VerificationFailed, match="segment 1 was archived with 51 events, and the table"):
        rows(broker, lake=LakeAccess(url=str(moved)))


def test_without_the_extra_the_error_says_what_to_install(filled: Lake) -> None:
    """In a process that cannot import deltalake; what the log has needs no extra, and nothing needs Spark."""
    archive_and_drop(filled)
    script = f"""
import sys
for name in {{hidden}}:
    sys.modules[name] = None
import pgmb
with pgmb.connect({filled.dsn!r}, max_size=1) as broker:
    print(len(broker.between("main", broker.earliest(), broker.position(), lake=False)))
    with broker.tail(after=broker.earliest(), follow=False) as events:
        print(sum(1 for _ in events))
"""

    def run(*hidden: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script.format(hidden=hidden)], capture_output=True, text=True, check=False
        )

    refused = run("deltalake", "pyarrow")
    assert refused.stdout.split() == ["30"]
    assert MissingExtra.__name__ in refused.stderr
    assert f"events of stream main are in the lake at {filled.url}" in refused.stderr
    assert 'pip install "pgmb[lake]"' in refused.stderr
    read = run("pyspark", "adbc_driver_manager")
    assert read.stdout.split() == ["30", "180"], read.stderr


def test_an_archive_that_is_older_than_a_rebase_comes_first_and_once(filled: Lake, broker: Broker) -> None:
    before = rows(broker)
    # As if another cluster had archived it, whose transaction ids are far ahead.
    filled.archive()
    filled.db.execute("update pgmb.segment set dropped_at = now(), max_xid = '900000000' where number = 0")
    filled.db.execute("truncate pgmb.segment_1_0")
    filled.db.execute("select pgmb.rebase()")
    position = broker.position()
    assert rows(broker) == before
    filled.publish(10)
    more = rows(broker, after=position)
    assert len(more) == 10, "nothing of the archive comes again"
    assert rows(broker, after=position, lake=False) == more, "the log has all that is new"
    archive_and_drop(filled)
    assert rows(broker) == before + more
    assert rows(broker, after=position) == more


async def test_the_asynchronous_client_reads_both_tiers(filled: Lake, broker: Broker) -> None:
    before = rows(broker)
    archive_and_drop(filled)
    async with await pgmb.aconnect(filled.dsn, max_size=1) as connected:
        earliest, upto = await connected.earliest(), await connected.position()
        assert [row(one) for one in await connected.between("main", earliest, upto)] == before
        async with connected.tail(after=earliest, follow=False) as events:
            assert [row(one) async for one in events] == before


def test_an_independent_reader_finds_the_same_events(filled: Lake, broker: Broker) -> None:
    """Polars reads the table, psycopg the log: together they are what the client reads."""
    archive_and_drop(filled)
    names = ["seq", "id", "topic", "key", "payload", "headers", "published_at"]
    archived = polars.read_delta(filled.url).select(names).sort("seq").rows()
    logged = filled.db.execute(
        "select e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, s.salt))::text, e.topic::text,"
        " e.key::text, e.payload::text, e.headers::text, e.published_at"
        " from pgmb.log_main e, pgmb.stream s where s.name = 'main' order by e.seq"
    ).fetchall()
    assert (len(archived), len(logged)) == (150, 30)
    assert [one[:7] for one in rows(broker)] == [*archived, *logged]
