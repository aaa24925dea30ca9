"""Apps and brokers in programs with several event loops, and after a fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import psycopg
import pytest

import pgmb
from harness.waiting import until, until_true


def connections(db: psycopg.Connection[Any], name: str) -> int:
    found = db.execute("select count(*) from pg_stat_activity where application_name = %s", [name]).fetchone()
    assert found is not None
    return int(found[0])


def test_event_loops_that_end_leave_no_connections(dsn: str, db: psycopg.Connection[Any]) -> None:
    app = pgmb.App(dsn, application_name="many loops")
    for number in range(8):
        asyncio.run(app.apublish("a", number))
    # Those of the last loop stay until the next call, three at most. One of each loop would be eight.
    until_true(lambda: connections(db, "many loops") <= 4, 20)
    asyncio.run(app.aclose())
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (8,)


async def test_a_cancellation_while_a_connection_arrives_is_not_lost(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with await pgmb.aconnect(dsn, max_size=1) as broker:
        for _ in range(5):
            async with broker.connection():
                waiting = asyncio.create_task(broker.publish("a", 1))
                await until(lambda: broker.pool_stats["requests_waiting"])
            while broker.pool_stats["requests_waiting"]:  # noqa: ASYNC110 - the very next step
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await broker.publish("a", 2)
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (1,)


AFTER_FORK = """
import asyncio, os, sys, pgmb
app = pgmb.App(sys.argv[1])
broker = pgmb.connect(sys.argv[1])
app.publish("a", "before")
broker.publish("a", "before")
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        try:
            broker.publish("a", "through the parent's sockets")
        except pgmb.PgmbError as error:
            assert "after the fork" in (error.hint or ""), error.hint
        else:
            os._exit(1)
        broker.close()
        ids = [app.publish("a", os.getpid()) for _ in range(20)]
        asyncio.run(app.apublish("a", os.getpid()))
        assert len(set(ids)) == 20
        app.close()
        sys.exit(7)
    children.append(child)
for n in range(40):
    broker.publish("a", "parent")
    app.publish("a", "parent")
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
broker.publish("a", "after")
app.publish("a", "after")
broker.close()
app.close()
"""


def test_a_broker_after_a_fork_says_so_and_an_app_connects_anew(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_FORK, dsn], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (4 + 80 + 3 * 21,)
