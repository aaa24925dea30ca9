"""Applications that publish by versions in status: how far they have come, and what they left staged."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgmb
from tests.conftest import Connect
from tests.contract.cast import Cast

DB = psycopg.Connection[Any]


def stage(db: DB, app: str, version: int | None, events: int, stream: str = "main") -> int:
    """What a task does in its transaction."""
    with db.transaction():
        row = db.execute("select pgmb.claim_stage(%s, %s, %s)", [stream, app, version]).fetchone()
        assert row is not None
        db.execute(
            f"insert into pgmb.stage_{row[0]} (topic, payload)"
            f" select 't', to_json(n) from generate_series(1, {events}) n"
        )
    return int(row[0])


def publish(
    db: DB, app: str, version: int, stages: list[int], events: list[int], stream: str = "main"
) -> None:
    db.execute(
        "select pgmb.publish_tasks(%s, %s, %s, %s::integer[], %s::integer[], %s::bigint[])",
        [stream, app, version, list(range(len(stages))), stages, events],
    )


def test_the_last_version_and_what_is_staged(dsn: str, db: DB) -> None:
    with pgmb.connect(dsn) as broker:
        assert broker.sink_status() == []
        first = stage(db, "job", 7, 3)
        (seen,) = broker.sink_status()
        assert (seen.app, seen.stream, seen.version, seen.stages) == ("job", "main", None, 1)
        assert seen.staged_at is not None
        publish(db, "job", 7, [first, stage(db, "job", 7, 2)], [3, 2])
        (seen,) = broker.sink_status()
        assert (seen.version, seen.events, seen.stages, seen.staged_at) == (7, 5, 0, None)
        assert seen.committed_at is not None
        stage(db, "job", 8, 1)
        (seen,) = broker.sink_status()
        assert (seen.version, seen.stages) == (7, 1)


def test_streams_are_apart(db: DB) -> None:
    db.execute("select pgmb.create_stream('audit')")
    publish(db, "job", 1, [stage(db, "job", 1, 1)], [1])
    stage(db, "job", 4, 1, "audit")
    told = db.execute("select app, stream, version, stages from pgmb.sink_status").fetchall()
    assert told == [("job", "audit", None, 1), ("job", "main", 1, 0)]


def test_what_is_being_written_is_not_yet_told_of(db: DB, connect: Connect) -> None:
    task = connect(autocommit=False)
    task.execute("select pgmb.claim_stage('main', 'job', 1)")
    assert db.execute("select * from pgmb.sink_status").fetchall() == []
    task.rollback()


async def test_the_asynchronous_client_has_them(dsn: str, db: DB) -> None:
    publish(db, "[odd] app", 1, [stage(db, "[odd] app", 1, 1)], [1])
    async with await pgmb.aconnect(dsn) as broker:
        assert [one.app for one in await broker.sink_status()] == ["[odd] app"]


def test_a_role_sees_the_sinks_of_streams_that_it_may_publish_to_or_read(db: DB, cast: Cast) -> None:
    db.execute("select pgmb.create_stream('a'), pgmb.create_stream('b'), pgmb.create_stream('c')")
    for stream in "abc":
        publish(db, "job", 1, [stage(db, "job", 1, 1, stream)], [1], stream)
    role = cast.role("spark")
    acting = cast.acting(role)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        acting.execute("select * from pgmb.sink_status")
    db.execute("select pgmb.grant_publish('a', %s)", [role])
    assert acting.execute("select stream from pgmb.sink_status").fetchall() == [("a",)]
    db.execute("select pgmb.grant_read('b', %s)", [role])
    assert acting.execute("select stream from pgmb.sink_status").fetchall() == [("a",), ("b",)]
