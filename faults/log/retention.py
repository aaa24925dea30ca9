"""Retention with a backlog: more than a thousand segments may go at once, beside publishers and consumers.

A stream gets that many sealed segments, then `keep_for` falls to 0. maintain() must drop and detach all of
them without an error, and nobody may wait for a lock of the log for more than 100 ms: the server itself tells
of each longer wait (log_lock_waits), so that the load on the machine does not count.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.errors import Diagnostic

# PostgreSQL's defaults: the size of the lock table follows from them.
SETTINGS = {"max_connections": 100, "max_prepared_transactions": 0}
_PUBLISH = "select pgmb.publish('t', '1')"
_RECEIVE = "select pgmb.ack(lease) from (select distinct lease from pgmb.receive('q', 20)) r"
_PAIRS = 2


@dataclass
class Result:
    segments: int
    dropped: int = 0
    detached: int = 0
    calls: int = 0
    rounds: int = 0
    errors: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        everything = self.dropped == self.detached == self.segments
        return everything and self.rounds > 0 and not self.errors and not self.waits

    def __str__(self) -> str:
        total = (
            f"{self.dropped} of {self.segments} segments dropped, {self.detached} detached in {self.calls} "
            f"calls, {len(self.errors)} errors, {len(self.waits)} waits of more than 100 ms in "
            f"{self.rounds} rounds of publishers and consumers"
        )
        return "\n".join((*self.errors[:5], *self.waits[:5], total))


def run(dsn: str, *, segments: int) -> Result:
    result = Result(segments)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("select pgmb.alter_stream('main', rotate_every => '0 s')")
        for _ in range(segments):
            db.execute("select pgmb.publish('t', '1')")
            db.execute("select pgmb.rotate()")
        # In parts: the locks of a transaction are bounded, too.
        while _value(db, "select pgmb.seal()"):
            pass
        db.execute("select pgmb.create_queue('q')")
        db.execute("select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '1 day')")
        stop = threading.Event()
        threads = [
            threading.Thread(target=_repeat, args=(dsn, statement, stop, result))
            for statement in (_PUBLISH, _RECEIVE) * _PAIRS
        ]
        for thread in threads:
            thread.start()
        try:
            _maintain(db, result)
            result.dropped = _value(db, "select count(*) from pgmb.segment where dropped_at is not null")
            # Tables are kept for a minute after they were emptied.
            db.execute("update pgmb.segment set dropped_at = dropped_at - interval '2 minutes'")
            _maintain(db, result)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        result.detached = result.dropped - _value(
            db,
            "select count(*) from pgmb.segment g where g.dropped_at is not null"
            " and to_regclass(format('pgmb.segment_%s_%s', g.stream, g.number)) is not null",
        )
    return result


def _maintain(db: psycopg.Connection[Any], result: Result) -> None:
    """Calls maintain() until it has nothing left to do."""
    more = True
    while more and not result.errors:
        try:
            more = _value(db, "select pgmb.maintain()")
        except psycopg.Error as error:
            result.errors.append(f"maintain: {error}")
        result.calls += 1
        # A lock that was not free is tried again in the next call.
        failing = _value(db, "select failing from pgmb.describe_broker()") or []
        result.errors += [step for step in failing if "55P03" not in step]


def _repeat(dsn: str, statement: str, stop: threading.Event, result: Result) -> None:
    def note(diagnostic: Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        if "still waiting" in message and "relation" in message:
            result.waits.append(f"{message}: {diagnostic.context}")

    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.add_notice_handler(note)
            connection.execute(
                "set deadlock_timeout = '100ms'; set log_lock_waits = on; set client_min_messages = log"
            )
            while not stop.is_set():
                connection.execute(statement.encode())
                result.rounds += 1
    except psycopg.Error as error:
        result.errors.append(str(error))


def _value(db: psycopg.Connection[Any], statement: str) -> Any:
    row = db.execute(statement.encode()).fetchone()
    assert row is not None
    return row[0]
