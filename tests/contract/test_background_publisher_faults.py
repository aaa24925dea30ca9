"""The background publisher while connections, servers and processes end."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock
from weakref import WeakSet

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgmb
from harness.postgres import Server
from pgmb._core import unclosed
from pgmb.cli.publish import decode_line
from pgmb.errors import PublisherClosed, PublishFailed
from tests.conftest import FreshServer
from tests.contract.cutting import CuttingProxy

PATIENCE = 60.0


def logged(db: psycopg.Connection[Any]) -> list[Any]:
    return [row[0] for row in db.execute("select payload from pgmb.log_main order by seq")]


@pytest.fixture
def own_server(fresh_server: FreshServer, install: Callable[[str], None]) -> Server:
    server = fresh_server()
    install(server.dsn())
    return server


@pytest.mark.crash
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_nothing_is_lost_or_repeated_over_a_restart(
    own_server: Server, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    restarted = threading.Event()

    def restart() -> None:
        own_server.stop("fast") if end == "stop" else own_server.kill()
        own_server.start_again()
        restarted.set()

    with pgmb.connect(own_server.dsn(), max_wait=5) as broker:
        with broker.publisher(flush_every=0.005, max_batch=20, max_pending=200) as publisher:
            for n in range(300):
                publisher.enqueue("a", n)
            thread = threading.Thread(target=restart)
            thread.start()
            total = 300
            while not restarted.is_set() and total < 20_000:
                publisher.enqueue("a", total, timeout=PATIENCE)
                total += 1
            thread.join()
            publisher.flush(PATIENCE)
        with own_server.connect() as db:
            assert logged(db) == list(range(total))


@pytest.mark.crash
def test_flush_raises_in_time_while_the_server_is_away_and_keeps_the_events(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with pgmb.connect(own_server.dsn(), max_wait=1) as broker, broker.publisher() as publisher:
        publisher.enqueue("a", 0)
        publisher.flush()
        own_server.stop("fast")
        for n in range(1, 100):
            publisher.enqueue("a", n)
        with pytest.raises(PublishFailed) as caught:
            publisher.flush(3)
        assert len(caught.value.events) == 99
        assert isinstance(caught.value.__cause__, psycopg.OperationalError)
        assert publisher.pending == 99
        assert publisher.failed == []
        own_server.start_again()
        publisher.flush(PATIENCE)
    with own_server.connect() as db:
        assert logged(db) == list(range(100))


@pytest.mark.crash
async def test_the_async_publisher_lives_through_an_outage(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with await pgmb.aconnect(own_server.dsn(), max_wait=1) as broker, broker.publisher() as publisher:
        await publisher.enqueue("a", 0)
        await publisher.flush()
        await asyncio.to_thread(own_server.kill)
        for n in range(1, 100):
            await publisher.enqueue("a", n)
        with pytest.raises(PublishFailed):
            await publisher.flush(2)
        await asyncio.to_thread(own_server.start_again)
        await publisher.flush(PATIENCE)
    with own_server.connect() as db:
        assert logged(db) == list(range(100))


@pytest.mark.crash
def test_closing_during_an_outage_raises_and_hands_over_the_events(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with pgmb.connect(own_server.dsn(), max_wait=1) as broker:
        publisher = broker.publisher()
        publisher.enqueue("a", 0)
        publisher.flush()
        own_server.stop("fast")
        publisher.enqueue("a", 1)
        with pytest.raises(PublishFailed) as caught:
            publisher.close(0.5)
        assert [bytes(event.payload) for event in caught.value.events] == [b"1"]


@pytest.mark.parametrize(("exactly_once", "times"), [(True, 1), (False, 2)])
@pytest.mark.parametrize("number", [1, 50, 2500])
def test_a_commit_whose_answer_is_lost_is_not_repeated(
    server: Server,
    dsn: str,
    db: psycopg.Connection[Any],
    exactly_once: bool,
    times: int,
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And without `exactly_once` it is: the cut happens where it should."""
    caplog.set_level(logging.CRITICAL)
    with CuttingProxy("127.0.0.1", server.port) as proxy:
        through = make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
        with (
            pgmb.connect(through) as broker,
            broker.publisher(flush_every=3600, max_batch=number, exactly_once=exactly_once) as publisher,
        ):
            publisher.enqueue("a", "before")
            publisher.flush(PATIENCE)
            # A batch of thousands ends with a commit of its own; a smaller one is one statement.
            proxy.cut_next_answer(b"COMMIT" if number > 2000 else b"the last")
            for n in range(number):
                publisher.enqueue("a", "the last" if n == number - 1 else n)
            publisher.flush(PATIENCE)
            assert proxy.cut.is_set()
            publisher.enqueue("a", "after")
    batch = [*range(number - 1), "the last"]
    assert logged(db) == ["before", *batch * times, "after"]


@pytest.mark.parametrize("moment", [b"the last", b"COMMIT"], ids=["statement", "commit"])
@pytest.mark.parametrize("keyed", [(0,), (1,), (0, 1, 2)], ids=["first", "second", "all"])
def test_dedup_keys_that_expire_do_not_repeat_a_batch_in_doubt(
    server: Server,
    dsn: str,
    db: psycopg.Connection[Any],
    keyed: tuple[int, ...],
    moment: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The events' own keys are free again when the publisher asks what became of the batch."""
    caplog.set_level(logging.CRITICAL)
    with CuttingProxy("127.0.0.1", server.port) as proxy:
        through = make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
        with (
            pgmb.connect(through) as broker,
            broker.publisher(flush_every=3600, dedup_for=0.000_001) as publisher,
        ):
            proxy.cut_next_answer(moment)
            for n in range(3):
                publisher.enqueue("a", f"the last of {n}", dedup_key=f"key {n}" if n in keyed else None)
            publisher.flush(PATIENCE)
            assert proxy.cut.is_set()
    assert logged(db) == ["the last of 0", "the last of 1", "the last of 2"]


def test_a_publisher_that_nobody_closed_is_flushed_at_exit(dsn: str, db: psycopg.Connection[Any]) -> None:
    script = (
        "import sys, logging, pgmb; logging.basicConfig(); broker = pgmb.connect(sys.argv[1]);"
        " publisher = broker.publisher(flush_every=3600);"
        " [publisher.enqueue('a', n) for n in range(10)]"
    )
    done = subprocess.run([sys.executable, "-c", script, dsn], capture_output=True, text=True, check=True)
    assert "a publisher was not closed; flushing 10 events" in done.stderr
    assert logged(db) == list(range(10))


def test_a_publisher_that_was_closed_says_nothing_at_exit(dsn: str) -> None:
    script = (
        "import sys, logging, pgmb; logging.basicConfig()\n"
        "with pgmb.connect(sys.argv[1]) as broker, broker.publisher() as publisher: publisher.enqueue('a', 1)"
    )
    done = subprocess.run([sys.executable, "-c", script, dsn], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_an_event_loop_that_ends_publishes_what_is_pending(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def forgetful() -> None:
        async with await pgmb.aconnect(dsn) as broker:
            await broker.publisher(flush_every=3600).enqueue("a", 1)

    asyncio.run(forgetful())
    assert "a publisher was not closed; flushing 1 events before its event loop ends" in caplog.text
    assert logged(db) == [1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_events_that_are_given_up_are_logged_as_lines_to_publish(
    dsn: str, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    events = [("a.b", {"n": 1, "text": "ä\n"}, "key", {"h": 1}, "dedup"), ("a.c", None, None, None, None)]

    def end() -> None:
        with pgmb.connect(dsn) as broker, broker.publisher() as publisher:
            for topic, payload, key, headers, dedup_key in events:
                publisher.enqueue(
                    topic, payload, key=key, headers=headers, dedup_key=dedup_key, stream="missing"
                )

    async def aend() -> None:
        async with await pgmb.aconnect(dsn) as broker, broker.publisher() as publisher:
            for topic, payload, key, headers, dedup_key in events:
                await publisher.enqueue(
                    topic, payload, key=key, headers=headers, dedup_key=dedup_key, stream="missing"
                )

    with pytest.raises(PublishFailed) as caught:
        asyncio.run(aend()) if asynchronous else end()
    logged = [record.getMessage() for record in caplog.records if record.name == "pgmb.unpublished"]
    assert all(line.startswith("an event of stream missing was not published: {") for line in logged)
    lines = [decode_line(line[line.index("{") :]) for line in logged]
    read = [line.event() for line in lines]
    assert [event.id for event in read] == [event.id for event in caught.value.events]
    assert [
        (
            event.topic,
            msgspec.json.decode(event.payload),
            event.key,
            event.headers and msgspec.json.decode(event.headers),
            event.dedup_key,
        )
        for event in read
    ] == events


ENDING = """
import atexit, sys
atexit.register(lambda: print("closed" if broker._pool.closed else "open"))
import pgmb
atexit.register(lambda: broker.publish("a", "at exit"))
broker = pgmb.connect(sys.argv[1])
"""


def test_the_end_of_a_process_closes_brokers_after_handlers_of_users(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    command = [sys.executable, "-c", ENDING, dsn]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("closed\n", "")
    assert logged(db) == ["at exit"]


TERMINATED = """
import os, signal, sys, threading, pgmb
publisher = pgmb.connect(sys.argv[1]).publisher(flush_every=3600)
for n in range(10):
    publisher.enqueue("a", n)
with publisher._lock:  # where a signal may find the main thread
    os.kill(os.getpid(), signal.SIGTERM)
    for n in range(100_000):
        pass
while True:
    signal.pause()
"""


def test_a_signal_that_finds_the_publisher_locked_publishes_and_ends_the_process(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED, dsn], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM
    assert logged(db) == list(range(10))


def test_a_publisher_that_begins_while_others_are_closed_stops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Growing(WeakSet[Any]):
        grown = False

        def __iter__(self) -> Iterator[Any]:
            if not self.grown:
                self.grown = True
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    publisher = Mock(pending=0, inherited=False, loop=None)
    publisher.close.return_value = None
    monkeypatch.setattr(unclosed, "_open", Growing([publisher]))
    unclosed._close_all()
    publisher.close.assert_called_once()
    publisher.hurry.assert_called_once()


async def test_a_pool_that_nobody_closed_ends_with_its_event_loop(dsn: str) -> None:
    """Also if its tasks are cancelled at the moment in which they are given something to do."""
    for steps in range(4):
        broker = await pgmb.aconnect(dsn)
        pool: Any = broker._pool
        task = pool._sched_runner
        pool._sched._event.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        assert (await asyncio.wait([task], timeout=PATIENCE))[0] == {task}
        broker.abandon()


def test_a_forked_child_is_told_to_make_its_own(dsn: str, db: psycopg.Connection[Any]) -> None:
    script = """
import os, sys, pgmb
broker = pgmb.connect(sys.argv[1])
publisher = broker.publisher(flush_every=3600)
publisher.enqueue("a", "the parent's")
child = os.fork()
if child == 0:
    for call in (lambda: publisher.enqueue("a", "the child's"), publisher.flush, publisher.discard_failed):
        try:
            call()
        except pgmb.errors.PublisherClosed as error:
            assert "after the fork" in error.hint
        else:
            os._exit(1)
    sys.exit(7)  # through the end of the process, where publishers are closed
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
publisher.close()
broker.close()
"""
    subprocess.run([sys.executable, "-c", script, dsn], capture_output=True, text=True, check=True)
    assert logged(db) == ["the parent's"]


def test_a_broker_closed_before_its_publisher_raises(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    broker = pgmb.connect(dsn)
    publisher = broker.publisher(flush_every=3600)
    publisher.enqueue("a", 1)
    broker.close()
    with pytest.raises(PublishFailed) as caught:
        publisher.close(0.2)
    assert len(caught.value.events) == 1
    with pytest.raises(PublisherClosed):
        publisher.enqueue("a", 1)
