"""Promise: a rebase keeps every queue where it stands: nothing is lost, and no acked event comes again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.postgres import Server, binaries, create_database
from harness.segments import rotated
from harness.sessions import Session, Sessions

QUEUES = {"plain": "", "ordered": ", '{t}', ordered => true, shards => 1", "fair": ", fair_by => 'key'"}


def publish(session: Session, *numbers: int) -> None:
    for number in numbers:
        session.run("select pgmb.publish('t', to_json(%s::int))", [number])


def take(session: Session, most: int, *, acks: bool = True, queue: str = "q") -> list[int]:
    rows = session.run("select lease, payload from pgmb.receive(%s, %s)", [queue, most])
    if rows and acks:
        session.run("select pgmb.ack(%s)", [rows[0][0]])
    return [payload for _, payload in rows]


def drain(session: Session, queue: str = "q") -> list[int]:
    taken = []
    while got := take(session, 100, queue=queue):
        taken += got
    return taken


def at_the_end(one: Session, late: Session) -> list[int]:
    """The queue has consumed a batch, and a transaction that was open then has committed: what waits."""
    late.run("begin")
    publish(late, 1)
    publish(one, *range(2, 80))
    publish(late, 80)
    publish(one, *range(81, 90))
    assert drain(one) == [*range(2, 80), *range(81, 90)]
    late.run("commit")
    return [1, 80]


def among_late_events(one: Session, late: Session) -> list[int]:
    late.run("begin")
    publish(late, *range(1, 31))
    publish(one, *range(100, 180))
    assert drain(one) == [*range(100, 180)]
    late.run("commit")
    publish(one, *range(180, 190))
    assert take(one, 10) == [*range(1, 11)]
    return [*range(11, 31), *range(180, 190)]


def behind_late_events(one: Session, late: Session) -> list[int]:
    late.run("begin")
    publish(late, 1)
    publish(one, *range(2, 80))
    publish(late, *range(80, 90))
    publish(one, *range(90, 120))
    assert drain(one) == [*range(2, 80), *range(90, 120)]
    late.run("commit")
    publish(one, *range(120, 140))
    taken = take(one, 6) + take(one, 2)
    waiting = [*[1], *range(80, 90), *range(120, 140)]
    assert len(taken) == 8
    assert set(taken) <= set(waiting)
    return [number for number in waiting if number not in taken]


def after_a_seek(one: Session, late: Session) -> list[int]:
    late.run("begin")
    publish(late, 1)
    publish(one, *range(2, 80))
    one.run("select pgmb.purge('q')")
    late.run("commit")
    publish(one, 80)
    return [1, 80]


def under_a_lease(one: Session, late: Session) -> list[int]:
    publish(one, *range(1, 80))
    publish(late, *range(80, 90))
    assert take(one, 10) == [*range(1, 11)]
    assert take(one, 10, acks=False) == [*range(11, 21)]
    return [*range(11, 90)]


@pytest.mark.once
@pytest.mark.parametrize("kind", QUEUES)
@pytest.mark.parametrize(
    "state", [at_the_end, among_late_events, behind_late_events, after_a_seek, under_a_lease]
)
def test_a_rebase_delivers_what_waited_and_nothing_else(sessions: Sessions, state: Any, kind: str) -> None:
    one, late = sessions.open("one", "late")
    one.run(f"select pgmb.create_queue('q'{QUEUES[kind]})")
    waiting = state(one, late)
    for _ in range(2):
        one.run("select pgmb.rebase()")
    publish(one, 1000)
    taken = drain(one)
    assert sorted(taken) == [*waiting, 1000]
    one.run("select pgmb.rebase()")
    assert drain(one) == []


@pytest.fixture
def restored(
    sessions: Sessions, db: psycopg.Connection[Any], server: Server, pg_major: int
) -> Iterator[Sessions]:
    """A database restored from a dump whose snapshot is three rotations older than its sequences."""
    programs = binaries(pg_major)
    if not (programs / "pg_dump").exists():
        pytest.skip("the build of this version has no pg_dump")
    one, dump = sessions.open("one", "dump")
    for stream in ("main", "other"):
        one.run("select pgmb.create_stream(%s)", [stream])
        one.run("select pgmb.create_queue(%s, stream => %s)", [stream, stream])
        one.run("select pgmb.publish('t', '1', stream => %s)", [stream])
    dump.run("begin isolation level repeatable read")
    snapshot = dump.value("select pg_export_snapshot()")
    for number in (2, 3, 4):
        for stream in ("main", "other"):
            rotated(db, stream)
            one.run("select pgmb.publish('t', to_json(%s::int), stream => %s)", [number, stream])
    name = create_database(server)
    made = subprocess.run(
        [programs / "pg_dump", "--snapshot", snapshot, "-d", server.dsn(db.info.dbname)],
        capture_output=True,
        check=True,
    )
    dump.run("commit")
    subprocess.run(
        [programs / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn(name)],
        input=made.stdout,
        capture_output=True,
        check=True,
    )
    with Sessions(server.dsn(name)) as opened:
        yield opened
    db.execute(f'drop database "{name}"'.encode())


@pytest.mark.once(15)
@pytest.mark.parametrize("mend", ["rebase", "maintain"])
def test_a_dump_taken_during_rotations_restores_into_streams_that_deliver(
    restored: Sessions, mend: str
) -> None:
    """A dump has the segments of its snapshot, and sequences that point to a later one."""
    one = restored["restored"]
    missing = one.run("select stream from pgmb.stream_health() where missing_segment = 3")
    assert missing == [("main",), ("other",)]
    one.run(f"select pgmb.{mend}()")
    assert one.run("select from pgmb.stream_health() where missing_segment is not null") == []
    for stream in ("main", "other"):
        for number in (5, 6, 7):
            one.run("select pgmb.publish('t', to_json(%s::int), stream => %s)", [number, stream])
            rotated(one.connection, stream)
        one.run("select pgmb.maintain()")
        assert drain(one, stream) == [1, 5, 6, 7]
        segments = one.run(
            "select s.number, closed_at is not null, sealed_at is not null from pgmb.segment s"
            " join pgmb.stream on stream.id = s.stream where stream.name = %s order by 1",
            [stream],
        )
        assert [number for number, closed, sealed in segments if closed and sealed] == [0, 1, 3, 4, 5]


def test_a_rebase_moves_a_sequence_behind_the_log(sessions: Sessions) -> None:
    """A logical copy has the events, but not the values of sequences."""
    one = sessions["one"]
    one.run("select pgmb.create_queue('q')")
    publish(one, *range(1, 10))
    assert take(one, 5) == [1, 2, 3, 4, 5]
    one.run("select setval('pgmb.seq_main', 1)")
    one.run("select pgmb.rebase()")
    publish(one, 10)
    assert drain(one) == [6, 7, 8, 9, 10]


def locked_segments(session: Session) -> int:
    """The segments that this transaction has locked."""
    return int(
        session.value(
            "select count(distinct relation) from pg_locks join pg_class c on c.oid = relation"
            " where pid = pg_backend_pid() and c.relname ~ '^segment_\\d+_\\d+$'"
        )
    )


def test_a_rebase_of_a_long_history_locks_few_segments_at_once(sessions: Sessions) -> None:
    one, late = sessions.open("one", "late")
    one.run("select pgmb.create_queue('q')")
    one.run("select pgmb.create_stream('other')")
    for number in range(106):
        publish(one, number)
        one.run("select pgmb.rotate()")
        if number % 40 == 0:
            one.run("select pgmb.publish('t', '1', stream => 'other')")
            one.run("select pgmb.rotate('other')")
    late.run("begin")
    publish(late, 500)
    publish(one, 106)
    assert drain(one) == [*range(107)]
    late.run("commit")
    assert one.run("select pgmb.rotate()") != [(None,)]
    publish(one, 107)
    while one.value("select pgmb.seal('main') + pgmb.seal('other')"):
        pass
    locked = []
    more = True
    while more:
        one.run("begin")
        more = one.value("select pgmb.rebase()")
        locked.append(locked_segments(one))
        one.run("commit")
    assert len(locked) > 1
    assert max(locked) <= 60
    # Segments that a rebase rewrote are not rewritten again.
    one.run("begin")
    assert one.value("select pgmb.rebase()") is False
    assert locked_segments(one) < 50
    one.run("commit")
    publish(one, 1000)
    assert sorted(drain(one)) == [107, 500, 1000]
    assert drain(one) == []
