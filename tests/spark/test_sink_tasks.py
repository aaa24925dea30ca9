"""What a task writes, and what is left of one that fails: real tasks and a real database, without a JVM."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from adbc_driver_manager import Error
from pyspark.sql import types as t

from harness.server import Server
from harness.stalling import StallingProxy
from pgmb.errors import InvalidArgument, PermissionDenied, StreamNotFound, TasksDiffer
from pgmb.spark.options import WriteOptions
from pgmb.spark.sink.columns import Columns
from pgmb.spark.sink.task import Task, TaskResult
from pgmb.spark.sink.writers import BatchWriter, StreamWriter
from tests.conftest import Connect
from tests.contract.cast import Cast

Connection = psycopg.Connection[Any]

STAGED: dict[str, str] = {}
DIRECT = {"commitMode": "direct"}
REPEATING = {"deliveryGuarantee": "at-least-once"}
EVERY = pytest.mark.parametrize(
    "mode", [STAGED, DIRECT, REPEATING], ids=["staged", "direct", "at-least-once"]
)

KINDS = t.StructType([t.StructField("topic", t.StringType()), t.StructField("payload", t.StringType())])
TIMED = t.StructType([*KINDS.fields, t.StructField("at", t.TimestampType())])


class Job:
    """A write of an application's version, run by hand: its tasks, then its end."""

    def __init__(
        self, dsn: str, mode: dict[str, str], kinds: t.StructType = KINDS, app: str = "app", version: int = 1
    ) -> None:
        named = {} if mode is REPEATING else {"txnAppId": app, "txnVersion": str(version)}
        self.given = {"url": dsn, **mode, **named}
        self.kinds, self.app, self.version = kinds, app, version
        self.options = WriteOptions.of(self.given, streaming=False)
        self.run = str(uuid4())

    def task(self, number: int, *batches: list[Any], source: Iterator[Any] | None = None) -> TaskResult:
        columns = Columns(self.kinds, self.options)
        task = Task(self.options, columns, self.app, self.version, number, self.run)
        return task.write(source or iter([self.batch(rows) for rows in batches]))

    def batch(self, rows: list[Any]) -> Any:
        names = self.kinds.names
        arrow = pa.schema([(n, pa.timestamp("us", "UTC") if n == "at" else pa.string()) for n in names])
        return pa.RecordBatch.from_pylist(
            [dict(zip(names, row if isinstance(row, tuple) else ("t", row), strict=True)) for row in rows],
            schema=arrow,
        )

    def commit(self, *messages: TaskResult) -> None:
        BatchWriter(self.given, self.kinds, overwrite=False).publish(messages)

    def abort(self) -> None:
        BatchWriter(self.given, self.kinds, overwrite=False).abandon(self.app, self.version)


def log(db: Connection) -> list[str]:
    rows = db.execute("select payload::text from pgmb.log_main order by seq").fetchall()
    return [row[0] for row in rows]


def held(db: Connection) -> list[tuple[int]]:
    return db.execute("select number from pgmb.stage where app is not null").fetchall()


@EVERY
def test_rows_become_events_in_their_order(dsn: str, db: Connection, mode: dict[str, str]) -> None:
    job = Job(dsn, mode)
    told = [job.task(0, ["1", "2"], [], ["3"]), job.task(1), job.task(2, [])]
    assert [one.events for one in told] == [3, 0, 0]
    job.commit(*told)
    assert log(db) == ["1", "2", "3"]
    assert held(db) == []


@EVERY
def test_nothing_is_published_before_its_time(dsn: str, db: Connection, mode: dict[str, str]) -> None:
    later = datetime.now(UTC) + timedelta(days=400)
    job = Job(dsn, mode, TIMED)
    job.commit(job.task(0, [("t", "1", None), ("t", "2", later), ("t", "3", later - timedelta(days=800))]))
    assert log(db) == ["1", "3"]
    assert db.execute("select payload::text, due_at from pgmb.delayed").fetchall() == [("2", later)]
    assert held(db) == []


@EVERY
def test_a_task_that_fails_leaves_nothing(dsn: str, db: Connection, mode: dict[str, str]) -> None:
    job = Job(dsn, mode)
    with pytest.raises(
        InvalidArgument, match=r"invalid input syntax for type json.*\{nope.*line 2, column payload"
    ):
        job.task(0, ["1", "{nope"])
    with pytest.raises(InvalidArgument, match=r"cannot hold the character NUL.*column topic"):
        job.task(0, [("a\0b", "1")])
    with pytest.raises(InvalidArgument, match="column topic is NULL"):
        job.task(0, ["1"], [(None, "1")])

    def broken() -> Iterator[Any]:
        yield job.batch(["1"])
        raise ZeroDivisionError("Spark's own")

    with pytest.raises(ZeroDivisionError, match="Spark's own"):
        job.task(0, source=broken())
    assert (log(db), held(db)) == ([], [])
    assert db.execute("select count(*) from pgmb.ledger_task").fetchall() == [(0,)]
    # The escape of NUL is JSON like any other.
    job.commit(job.task(0, [r'"\u0000"']))
    assert log(db) == [r'"\u0000"']


@EVERY
def test_a_stream_that_is_not_there_or_not_granted_is_named(
    server: Server, dsn: str, db: Connection, connect: Connect, mode: dict[str, str]
) -> None:
    with pytest.raises(StreamNotFound, match="stream 'nowhere' does not exist"):
        Job(dsn, {**mode, "stream": "nowhere"}).task(0, ["1"])
    db.execute("select pgmb.create_stream('closed')")
    cast = Cast(server, db.info.dbname, connect)
    role = cast.role("publisher")
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    granted = Job(server.dsn(db.info.dbname, role), mode)
    granted.commit(granted.task(0, ["1"]))
    with pytest.raises(PermissionDenied, match=r"may not publish to stream closed|permission denied"):
        Job(server.dsn(db.info.dbname, role), {**mode, "stream": "closed"}, app="b").task(0, ["1"])
    assert log(db) == ["1"]
    cast.leave(db)


@pytest.mark.parametrize("mode", [STAGED, DIRECT], ids=["staged", "direct"])
def test_what_is_repeated_is_published_once(dsn: str, db: Connection, mode: dict[str, str]) -> None:
    """A task by the same run, then all of them by another."""
    job = Job(dsn, mode)
    job.task(0, ["1"])
    told = [job.task(0, ["1"]), job.task(1, ["2"])]
    job.commit(*told)
    again = Job(dsn, mode)
    again.commit(*[again.task(0, ["1"]), again.task(1, ["2"])])
    job.commit(*told)
    assert log(db) == ["1", "2"]
    assert held(db) == []


def test_at_least_once_repeats_with_the_same_ids(dsn: str, db: Connection) -> None:
    for _ in range(2):
        Job(dsn, REPEATING).task(0, ["1", "2"], ["3"])
    rows = db.execute(
        "select count(*), count(distinct id), count(distinct (id, payload::text)) from pgmb.log_main"
    )
    assert rows.fetchall() == [(6, 3, 3)]


def test_a_driver_that_dies_after_some_tasks_published_directly(dsn: str, db: Connection) -> None:
    Job(dsn, DIRECT).task(0, ["1", "2"])
    assert log(db) == ["1", "2"]
    # In other batches and another order, as a shuffle may have it.
    job = Job(dsn, DIRECT)
    told = [job.task(0, ["2"], ["1"]), job.task(1, ["3"])]
    assert log(db) == ["1", "2"]
    job.commit(*told)
    assert log(db) == ["1", "2", "3"]
    assert held(db) == []


def test_another_cut_is_refused_with_both_named(dsn: str, db: Connection) -> None:
    Job(dsn, DIRECT).task(0, ["1", "2"])
    job = Job(dsn, DIRECT)
    told = [job.task(0, ["1"]), job.task(1, ["2"]), job.task(2, ["3"])]
    with pytest.raises(
        TasksDiffer, match=r"task 0 published 2 events, and now it holds 1; 1 task .* it has 3 now"
    ):
        job.commit(*told)
    job.abort()
    assert log(db) == ["1", "2"]
    assert held(db) == []
    right = Job(dsn, DIRECT)
    right.commit(*[right.task(0, ["1", "2"]), right.task(1, ["3"])])
    assert log(db) == ["1", "2", "3"]


@EVERY
def test_memory_does_not_grow_with_the_task(dsn: str, db: Connection, mode: dict[str, str]) -> None:
    job = Job(dsn, mode)
    made: list[weakref.ref[Any]] = []
    most = 0

    def many() -> Iterator[Any]:
        nonlocal most
        for number in range(60):
            batch = job.batch([f'"{number}-{row}-{"x" * 1000}"' for row in range(50)])
            made.append(weakref.ref(batch))
            most = max(most, sum(one() is not None for one in made))
            yield batch
            del batch

    job.commit(job.task(0, source=many()))
    assert db.execute("select count(*) from pgmb.log_main").fetchall() == [(3000,)]
    assert most <= 4


@EVERY
def test_strings_that_are_not_utf_8_are_told_from_nul(dsn: str, mode: dict[str, str]) -> None:
    wrong = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    batch = pa.RecordBatch.from_arrays([wrong, pa.array(["1"])], names=["topic", "payload"])
    with pytest.raises(InvalidArgument, match=r"strings of events must be UTF-8: .*column topic"):
        Job(dsn, mode).task(0, source=iter([batch]))


class Query:
    """A streaming write, run by hand: a batch is one task and the driver's commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dsn: str, mode: dict[str, str]) -> None:
        self.given = {"url": dsn, "topic": "t", "txnAppId": "query", **mode}
        self._patch = monkeypatch

    def batch(self, number: int, *payloads: str) -> None:
        told = {"streaming.sql.batchId": str(number)}
        context = SimpleNamespace(getLocalProperty=told.get, partitionId=lambda: 0)
        self._patch.setattr("pgmb.spark.sink.writers.TaskContext", SimpleNamespace(get=lambda: context))
        kinds = t.StructType([t.StructField("payload", t.StringType())])
        writer = StreamWriter(self.given, kinds, overwrite=False)
        rows = pa.RecordBatch.from_arrays([pa.array(payloads)], names=["payload"])
        writer.commit([writer.write(iter([rows]))], number)


@pytest.mark.parametrize("mode", [STAGED, DIRECT], ids=["staged", "direct"])
def test_batches_of_a_new_checkpoint_are_not_dropped_for_an_old_name(
    dsn: str, db: Connection, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(monkeypatch, dsn, mode)
    for number in (0, 1, 2):
        query.batch(number, str(number))
    # A driver that died before Spark's own commit does its last batch again.
    query.batch(2, "2")
    assert log(db) == ["0", "1", "2"]
    with pytest.raises(TasksDiffer, match="version 0 of application 'query' cannot be published"):
        query.batch(0, "10")
    assert (log(db), held(db)) == (["0", "1", "2"], [])


@EVERY
def test_a_query_that_has_published_waits_for_its_database(
    dsn: str, db: Connection, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In workers that were not there before as well. At its first batch the address may be wrong."""
    with StallingProxy(dsn) as proxy:
        query = Query(monkeypatch, proxy.dsn, mode)
        proxy.cut()
        with pytest.raises(Error):
            query.batch(0, "0")
        assert proxy.refused == 1

        def restore() -> None:
            while (proxy.refused or 0) < 3:
                time.sleep(0.02)
            proxy.restore()

        threading.Thread(target=restore, daemon=True).start()
        query.batch(1, "1")
    assert log(db) == ["1"]
