"""pgmb top and status."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgmb import Position, QueueStatus, ReaderStatus, StreamStatus, connect
from pgmb.cli.rates import Activity, Look, frame
from tests.cli.conftest import OpenTerminal, Run


@pytest.fixture
def load(dsn: str, db: psycopg.Connection[Any]) -> Iterator[None]:
    """Somebody publishes and receives in queue `busy`, and clears up behind as a janitor does."""
    db.execute("select pgmb.create_queue('busy')")
    stop = threading.Event()

    def work() -> None:
        with connect(dsn, max_size=1) as broker:
            while not stop.wait(0.005):
                broker.publish_many("t", range(10))
                broker.receive("busy", 10).ack()
                broker.maintain()

    working = threading.Thread(target=work)
    working.start()
    yield
    stop.set()
    working.join(30)


def test_one_frame_has_rates_between_two_looks(run: Run, load: None) -> None:
    seen = run("top", "--once", "--interval", "1s", "--json").json
    (stream,), (queue,) = seen["streams"], seen["queues"]
    assert stream["published_per_second"] > 0
    assert 0.3 < queue["received_per_second"] / stream["published_per_second"] < 3
    printed = run("top", "--once", "--interval", "100ms").out
    for heading in ("Streams", "published/s", "Queues", "received/s", "oldest", "leases", "dead/s"):
        assert heading in printed


def test_it_redraws_pauses_and_quits_on_a_terminal(terminal: OpenTerminal, load: None) -> None:
    with terminal("top", "--interval", "200ms") as shown:
        shown.wait_for(lambda: shown.raw.count("\x1b[H") >= 4)
        shown.wait_for(lambda: "busy" in shown.frame and "q quit" in shown.frame)
        shown.send("p")
        shown.wait_for(lambda: "pgmb top  paused" in shown.frame)
        shown.send("p")
        shown.wait_for(lambda: re.search(r"pgmb top  \d\d:", shown.frame) is not None)
        shown.send("q")
        assert shown.finish() == 0
        assert shown.raw.endswith("\x1b[?25h\x1b[?1049l"), "the cursor and the screen are back"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_ended_leaves_the_terminal_as_it_was(terminal: OpenTerminal, number: int) -> None:
    with terminal("top", "--interval", "1m") as shown:
        shown.wait_for(lambda: "Queues" in shown.frame)
        shown.process.send_signal(number)
        assert shown.finish() == 0
        assert "\x1b[?1049l" in shown.raw
        assert "Traceback" not in shown.text


def test_a_line_of_json_a_refresh(terminal: OpenTerminal) -> None:
    with terminal("top", "--json", "--interval", "100ms") as shown:
        shown.wait_for(lambda: shown.text.count('"streams"') >= 3)
        shown.process.send_signal(signal.SIGINT)
        assert shown.finish() == 0


def test_status_shows_streams_and_queues(run: Run, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.pause('q', 'deploy')")
    status = run("status", "--json").json
    assert [one["stream"] for one in status["streams"]] == ["main"]
    assert [one["queue"] for one in status["queues"]] == ["q"]
    assert "deploy" in run("status").out


def test_status_and_top_show_readers(run: Run, db: psycopg.Connection[Any]) -> None:
    assert run("status", "--json").json["readers"] == []
    assert "Readers" not in run("status").out
    assert "Readers" not in run("top", "--once", "--interval", "100ms").out
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    db.execute("select pgmb.publish_many('t', array(select to_json(n) from generate_series(1, 20) n))")
    (reader,) = run("status", "--json").json["readers"]
    assert (reader["reader"], reader["stream"], reader["waiting"]) == ("lake", "main", 20)
    assert reader["waiting_bytes"] > 0
    printed = run("status").out
    assert all(heading in printed for heading in ("Readers", "lake", "lag", "confirmed"))
    (row,) = run("top", "--once", "--interval", "100ms", "--json").json["readers"]
    assert (row["reader"], row["waiting"], row["read_per_second"]) == ("lake", 20, 0.0)
    printed = run("top", "--once", "--interval", "100ms").out
    assert all(heading in printed for heading in ("Readers", "read/s", "holds back"))


def test_status_shows_sinks(run: Run, db: psycopg.Connection[Any]) -> None:
    assert run("status", "--json").json["sinks"] == []
    assert "Sinks" not in run("status").out
    db.execute("select pgmb.publish_tasks('main', 'hourly', 20260131, '{}', '{}', '{}')")
    (sink,) = run("status", "--json").json["sinks"]
    assert (sink["app"], sink["version"], sink["stages"]) == ("hourly", 20260131, 0)
    printed = run("status").out
    assert all(word in printed for word in ("Sinks", "hourly", "20260131", "committed", "stages"))


# -- rates, without a database -------------------------------------------------------------------------------


def stream(events: int) -> StreamStatus:
    return StreamStatus("main", 1, 0, 0, events, 0, 7.0, None, 0, [])


def queue(dead: int) -> QueueStatus:
    bounds = ["dead"] if dead > 10_000 else []
    counts = (0, None, 0, 0, 0, min(dead, 10_000), 5.0, None, 0)
    return QueueStatus("q", "main", ["#"], None, None, *counts, bounds, [])


def looked(clock: float, events: int, dead: int, receives: int | None) -> Look:
    activity = {} if receives is None else {"q": Activity(receives, 10.0)}
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=clock)
    return Look(at, clock, [stream(events)], [queue(dead)], [], activity)


@pytest.mark.parametrize(
    ("before", "now", "published", "received", "died"),
    [
        (None, looked(0, 100, 0, 5), 7.0, 5.0, None),
        (looked(0, 100, 0, 5), looked(2, 300, 4, 9), 100.0, 20.0, 2.0),
        # Retention dropped a segment; dead letters were redriven; somebody may not look closely.
        (looked(0, 100, 9, None), looked(2, 50, 0, None), 7.0, 5.0, 0.0),
        # More than are counted.
        (looked(0, 0, 9_000, 0), looked(2, 0, 10_000, 0), 0.0, 0.0, 500.0),
        (looked(0, 0, 10_001, 0), looked(2, 0, 10_001, 0), 0.0, 0.0, None),
    ],
)
def test_rates(before: Look | None, now: Look, published: float, received: float, died: float | None) -> None:
    seen = frame(before, now)
    assert seen.streams[0].published_per_second == published
    assert seen.queues[0].received_per_second == received
    assert seen.queues[0].dead_per_second == died


def reading(clock: float, events: int, *waiting: int) -> Look:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=clock)
    position = Position.parse("(1,5,0,0,3:3:,0,3)")
    readers = [ReaderStatus("r", "main", position, at, one, 0, None, 0, None, False) for one in waiting]
    return Look(at, clock, [stream(events)], [], readers, {})


@pytest.mark.parametrize(
    ("before", "now", "read"),
    [
        (None, reading(0, 100, 10), None),
        (reading(0, 100, 10), reading(2, 200, 10), 50.0),
        (reading(0, 100, 10), reading(2, 200, 110), 0.0),
        (reading(0, 100, 50), reading(2, 100, 10), 20.0),
        # It is new; it was put back; retention dropped a segment.
        (reading(0, 100), reading(2, 200, 10), None),
        (reading(0, 100, 0), reading(2, 100, 100), 0.0),
        (reading(0, 100, 0), reading(2, 50, 0), None),
    ],
)
def test_how_fast_a_reader_reads(before: Look | None, now: Look, read: float | None) -> None:
    assert frame(before, now).readers[0].read_per_second == read
