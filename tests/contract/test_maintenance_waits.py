"""Promise 7: rotation, sealing and retention never hold up a publisher or a reader for more than 100 ms.

Whatever is open meanwhile: a publisher's transaction with a number in the segment, a reader's transaction
that has read it. The server itself tells of every longer wait (log_lock_waits), so that the load on the
machine does not count.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest
from psycopg.errors import Diagnostic

from harness.sessions import Session, Sessions
from harness.states import add_settled_claims


class Watched:
    """Repeats statements in a session of its own and keeps what the server says about its waits."""

    def __init__(self, dsn: str, *statements: str) -> None:
        self._dsn, self._statements = dsn, statements
        self._stop = threading.Event()
        self.waits: list[str] = []
        self.rounds = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                tell_waits(connection, self.waits)
                while not self._stop.is_set():
                    for statement in self._statements:
                        self._execute(connection, statement)
                    self.rounds += 1
        except psycopg.Error as error:
            self.waits.append(str(error))

    def _execute(self, connection: psycopg.Connection[Any], statement: str) -> None:
        try:
            connection.execute(statement)
        except psycopg.Error as error:
            # History is gone: retention that keeps nothing overtook a statement between two of its functions.
            if error.sqlstate != "MB012":
                raise

    def begin_anew(self) -> None:
        """Wait until no statement is under way that began before this call."""
        wanted, deadline = self.rounds + 2, time.monotonic() + 120
        while self.rounds < wanted and self._thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)


def tell_waits(connection: psycopg.Connection[Any], waits: list[str]) -> None:
    """Collects each wait of more than 100 ms for a table: queues are locked for their order, which is
    theirs."""

    def note(diagnostic: Diagnostic) -> None:
        if "still waiting" in (diagnostic.message_primary or "") and "relation" in (
            diagnostic.message_primary or ""
        ):
            waits.append(f"{diagnostic.message_primary}: {diagnostic.context}")

    connection.add_notice_handler(note)
    connection.execute(
        "set deadlock_timeout = '100ms'; set log_lock_waits = on; set client_min_messages = log"
    )


PUBLISH = "select pgmb.publish('t', '1')"
READ = "select count(*) from pgmb.between('main', pgmb.earliest(), pgmb.position(), 0, 50)"
TAIL = "select count(*) from pgmb.between('main', pgmb.position(), pgmb.position())"
RECEIVE = "select pgmb.ack(lease) from (select distinct lease from pgmb.receive('q', 20)) r"


def test_no_publisher_or_reader_waits_for_maintenance(sessions: Sessions, dsn: str) -> None:
    """Transactions that wrote to and read from every segment stay open across the whole of it."""
    janitor, publisher, reader = sessions.open("janitor", "publisher", "reader")
    janitor.run("select pgmb.create_queue('q')")
    janitor.run("select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '0 s')")
    with Watched(dsn, PUBLISH, TAIL, RECEIVE) as one, Watched(dsn, PUBLISH, RECEIVE) as two:
        for _ in range(6):
            publisher.run("begin")
            publisher.run(PUBLISH)
            reader.run("begin")
            reader.run("select count(*) from pgmb.log_main")
            for call in ("rotate()", "seal()", "drop_segments()", "detach_dropped()", "maintain()"):
                janitor.run(f"select pgmb.{call}")
                publisher.run(PUBLISH)
                reader.run("select count(*) from pgmb.log_main")
            publisher.run("commit")
            reader.run("commit")
            for call in ("seal()", "drop_segments()", "detach_dropped()", "maintain()"):
                janitor.run(f"select pgmb.{call}")
    assert one.waits + two.waits == []
    assert min(one.rounds, two.rounds) > 3
    assert janitor.value("select count(*) from pgmb.segment where dropped_at is not null") >= 3


@pytest.mark.parametrize("step", ["rotate", "seal", "drop_segments", "maintain"])
def test_an_open_maintenance_step_holds_nobody_up(sessions: Sessions, step: str) -> None:
    """The step itself in a transaction that stays open: publishers and queues go on, whatever it locked."""
    janitor, publisher, consumer = sessions.open("janitor", "publisher", "consumer")
    janitor.run("select pgmb.create_queue('q')")
    janitor.run("select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '0 s')")
    publisher.run(PUBLISH)
    consumer.run(RECEIVE)
    janitor.run("select pgmb.rotate()")
    publisher.run(PUBLISH)
    if step in ("drop_segments", "maintain"):
        consumer.run(RECEIVE)
        janitor.run("select pgmb.seal()")
    waits: list[str] = []
    for session in (publisher, consumer):
        tell_waits(session.connection, waits)
    janitor.run("begin")
    janitor.run(f"select pgmb.{step}()")
    publisher.run(PUBLISH)
    publisher.run("select pgmb.publish_many('t', array['1']::json[])")
    consumer.run("select pgmb.tick()")
    receiving = consumer.start("select lease from pgmb.receive('q')")
    try:
        assert receiving.result() != []
    finally:
        janitor.run("commit")
    assert waits == []


def test_maintenance_with_much_to_do_holds_nobody_up(sessions: Sessions, dsn: str) -> None:
    """A cron job that had not run for long: segments to seal, drop and detach, claims to clear, delays.

    The server counts a wait by the clock, and a busy machine may stop the janitor while it holds a lock: a
    wait that is ours comes every time.
    """
    janitor = sessions["janitor"]
    janitor.run("select pgmb.create_queue('q')")
    janitor.run("select pgmb.create_queue('lagging', max_attempts => 3)")
    janitor.run(
        "select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '0 s', drop_unread => true)"
    )
    seen: list[list[str]] = []
    while len(seen) < 3 and (not seen or seen[-1]):
        seen.append(_waits_for_much_maintenance(janitor, dsn, len(seen)))
    assert not seen[-1], seen


def _waits_for_much_maintenance(janitor: Session, dsn: str, attempt: int) -> list[str]:
    for _ in range(4):
        janitor.run("select pgmb.publish_many('t', array_fill('1'::json, array[200]))")
        janitor.run("select pgmb.rotate()")
    add_settled_claims(janitor, 40_000, nth=1 + attempt)
    janitor.run(
        "insert into pgmb.delayed (id, stream, due_at, topic, payload)"
        " select gen_random_uuid(), 'main', now(), 't', '1' from generate_series(1, 20000)"
    )
    lagging = "select pgmb.ack(lease) from (select distinct lease from pgmb.receive('lagging', 20)) r"
    with Watched(dsn, PUBLISH, RECEIVE) as one, Watched(dsn, lagging) as two:
        for _ in range(3):
            janitor.run("select pgmb.maintain()")
            # Segments are detached a minute after they were emptied: by then all have looked into them.
            for session in (one, two):
                session.begin_anew()
            janitor.run("update pgmb.segment set dropped_at = dropped_at - interval '2 minutes'")
    waits = one.waits + two.waits
    assert all("still waiting" in wait for wait in waits), waits
    return waits
