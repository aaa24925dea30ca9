"""`pgmb demo`: everything that it promises to show is there, and nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import psycopg
from psycopg.conninfo import make_conninfo

from harness.states import retries
from tests.cli.conftest import Run

SEEN = """
select exists (select from pgmb.dead) dead, exists (select from pgmb.attempt where error is not null) refused,
  exists (select from pgmb.schedule where last_at is not null) scheduled,
  exists (select from pgmb.delayed) delayed, exists (select from pgmb.worker) workers,
  exists (select from pgmb.endpoint_activity where delivered > 0) posted
"""


def databases(db: psycopg.Connection[Any]) -> set[str]:
    return {
        name for (name,) in db.execute("select datname from pg_database where datname like 'pgmb\\_demo%'")
    }


def test_the_demo_shows_what_it_says_and_removes_it(dsn: str, db: psycopg.Connection[Any]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pgmb", "demo"],
        env={**os.environ, "PGMB_DSN": dsn},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            said = ""
            while "pgmb doctor" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
            (name,) = databases(db)
            assert name in said
            found = re.search(r"Dashboard  (\S+)/ui\nAPI key    (\S+)", said)
            assert found is not None
            until_all_is_seen(make_conninfo(dsn, dbname=name))
            with httpx.Client(base_url=found[1], timeout=60) as client:
                assert (
                    client.get("/v1/queues", headers={"Authorization": f"Bearer {found[2]}"}).status_code
                    == 200
                )
                signed = client.post("/ui/login", data={"key": found[2]})
                assert signed.status_code in (302, 303)
                for path in re.findall(rf"{re.escape(found[1])}(/ui/\S+)", said):
                    assert client.get(path).status_code == 200, path
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
    assert (process.wait(60), rest.splitlines()[-1]) == (0, f"Dropped database {name}.")
    assert databases(db) == set()


def until_all_is_seen(dsn: str) -> None:
    end = time.monotonic() + 120
    with psycopg.connect(dsn, autocommit=True) as connection:
        seen: dict[str, bool] = {}
        while not seen or not all(seen.values()):
            cursor = connection.execute(SEEN)
            columns = [column.name for column in cursor.description or ()]
            found = dict(zip(columns, cursor.fetchone() or (), strict=True))
            found["retried"] = any(event.attempt > 1 for event in retries(connection))
            for name, there in found.items():
                seen[name] = seen.get(name, False) or there
            assert time.monotonic() < end, seen
            time.sleep(0.1)


def test_a_role_that_may_not_create_databases_is_told_what_to_do(
    run: Run, dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute("create role visitor login")
    try:
        outcome = run("demo", dsn=make_conninfo(dsn, user="visitor"))
    finally:
        db.execute("drop role visitor")
    assert outcome.code == 1
    assert "role visitor may not create databases" in outcome.err
    assert "alter role visitor createdb" in outcome.err
