"""examples/outbox: requests publish in their transactions, also after a restart of the database."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from harness.databases import create_database
from harness.ports import free_port
from harness.waiting import PATIENCE, until_true
from pgmb import schema
from tests.conftest import FreshServer

ROOT = Path(__file__).resolve().parents[3]
MODULE = "examples.outbox.fastapi_asyncpg"


def orders(dsn: str) -> Any:
    with psycopg.connect(dsn) as db:
        return db.execute("select total, receipt_sent from orders order by id").fetchall()


@pytest.mark.once(18)
@pytest.mark.timeout(180)
def test_fastapi_on_asyncpg_goes_on_after_a_restart_of_the_database(fresh_server: FreshServer) -> None:
    server = fresh_server()
    name, port = create_database(server), free_port()
    dsn = server.dsn(name)
    schema.install(dsn)
    environment = {**os.environ, "DATABASE_URL": server.url(name)}
    programs = (
        ["uvicorn", f"{MODULE}:api", "--port", str(port), "--log-level", "critical"],
        ["pgmb", "work", f"{MODULE}:events", "--no-services"],
    )
    with ExitStack() as stack:
        for program in programs:
            started = subprocess.Popen([sys.executable, "-m", *program], cwd=ROOT, env=environment)
            stack.enter_context(started)
            stack.callback(started.terminate)

        def paid(total: int) -> int:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/orders/{total}", timeout=PATIENCE)
            except httpx.TransportError:
                return 0
            return answer.status_code

        until_true(lambda: paid(1) == 200)
        assert paid(0) == 500
        until_true(lambda: orders(dsn) == [(1, True)])
        server.restart()
        until_true(lambda: paid(2) == 200)
        until_true(lambda: orders(dsn)[-1] == (2, True))
        assert orders(dsn) == [(1, True), (2, True)]
