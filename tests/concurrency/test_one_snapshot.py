"""Promise: status functions read one snapshot, so their figures agree while events move.

A consumer receives one event and returns it for a retry, over and over, while the test reads its status.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.conftest import Connect

SQL = Path(__file__).parents[2] / "src/pgmb/sql/status"
WRITING = {"derived_number", "drop_dead_letters", "note_move", "note_untraced", "redrive_dead"}
"""Functions of that folder that write, and derived_number, which reads a sequence."""


@pytest.fixture
def moving(db: psycopg.Connection[Any], connect: Connect) -> Iterator[str]:
    """The id of an event that a consumer receives and retries until the test ends."""
    db.execute("select pgmb.create_queue('q', max_attempts => 1000000, backoff_base => '0')")
    (found,) = db.execute("select pgmb.publish('t', '1')").fetchall()[0]
    consumer, ended = connect(), threading.Event()

    def work() -> None:
        while not ended.is_set():
            for (lease,) in consumer.execute("select lease from pgmb.receive('q')").fetchall():
                consumer.execute("select pgmb.retry(%s, after => '0')", [lease])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield str(found)
    finally:
        ended.set()
        thread.join()


def test_an_event_in_motion_is_counted_once(db: psycopg.Connection[Any], moving: str) -> None:
    counts = {
        row
        for _ in range(400)
        for row in db.execute("select waiting + leased_events + retries from pgmb.queue_status").fetchall()
    }
    assert counts == {(1,)}


def test_an_event_in_motion_is_never_done(db: psycopg.Connection[Any], moving: str) -> None:
    states = {
        fate["state"]
        for _ in range(300)
        for (fates,) in db.execute("select pgmb.event_fate(%s) -> 'consumers'", [moving]).fetchall()
        for fate in fates
    }
    assert states <= {"waiting", "leased", "retrying"}


def test_status_functions_are_not_volatile(db: psycopg.Connection[Any]) -> None:
    """In a volatile function, each statement takes a new snapshot."""
    written = "".join(path.read_text() for path in SQL.glob("*.sql"))
    named = re.findall(r"create or replace function pgmb(?:_internal)?\.(\w+)\(", written)
    volatile = db.execute(
        "select distinct proname from pg_proc where proname = any (%s) and provolatile = 'v'"
        " and pronamespace::regnamespace::text in ('pgmb', 'pgmb_internal')",
        [named],
    ).fetchall()
    assert {name for (name,) in volatile} == WRITING
