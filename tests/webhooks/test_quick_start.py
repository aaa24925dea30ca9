"""The quick start of fraruiz/pgmb, end to end: psql, `pgmb dispatcher` and a small web server."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any, ClassVar

import psycopg
import pytest

from harness.dispatchers import Dispatchers
from harness.postgres import binaries

START = """
SELECT pgmb.worker('order_processor', 'http://localhost:{port}/process', 100) AS worker \\gset
SELECT pgmb.create('order_queue', 'order.*', :'worker', 3);
-- As it is the first delay would be a second.
SELECT pgmb.alter_queue('order_queue', backoff_base => '200 ms');
SELECT pgmb.send(gen_random_uuid(), 'order.created', '{{"order_id": 123, "amount": 45.67}}'::jsonb);
SELECT pgmb.send(gen_random_uuid(), 'order.created', '{{"order_id": 124}}'::jsonb,
    '{{"source": "web", "priority": "high"}}'::jsonb);
SELECT pgmb.send(gen_random_uuid(), 'order.created', '{{"order_id": 125}}'::jsonb,
    '{{"source": "web"}}'::jsonb, 1);
SELECT pgmb.send('550e8400-e29b-41d4-a716-446655440000', 'order.failed', '{{"order_id": 500}}'::jsonb);
"""


class Processor(BaseHTTPRequestHandler):
    """Remembers what it gets, and fails at one order."""

    got: ClassVar[list[tuple[float, str, str, Any]]] = []

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.got.append((time.monotonic(), self.path, self.headers["webhook-id"], order))
        self.send_response(500 if order["order_id"] == 500 else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    Processor.got.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Processor) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def psql(dsn: str, script: str) -> str:
    command = [
        str(binaries(15) / "psql"),
        "-X",
        "-q",
        "-A",
        "-t",
        "-v",
        "ON_ERROR_STOP=1",
        "-d",
        dsn,
        "-f",
        "-",
    ]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, Processor.got
        time.sleep(0.05)


def test_worker_queue_send_receive_retry_bury(dsn: str, db: psycopg.Connection[Any], port: int) -> None:
    psql(dsn, START.format(port=port))

    def is_so(statement: str) -> bool:
        return db.execute(statement).fetchone() == (True,)

    with Dispatchers(dsn):
        until(lambda: is_so("select last_heartbeat is not null from pgmb.workers"))
        until(lambda: len(Processor.got) >= 7)
        until(lambda: is_so("select exists (select from pgmb.order_dead_letter_queue)"))
        until(lambda: is_so("select not exists (select from pgmb.order_queue)"))
    orders = [order["order_id"] for *_, order in Processor.got]
    assert sorted(orders) == [123, 124, 125, 500, 500, 500, 500]
    assert {path for _, path, *_ in Processor.got} == {"/process"}
    failed = [(at, identity) for at, _, identity, order in Processor.got if order["order_id"] == 500]
    assert {identity for _, identity in failed} == {"550e8400-e29b-41d4-a716-446655440000"}
    waits = [later - earlier for (earlier, _), (later, _) in pairwise(failed)]
    # Each is twice the one before, but for a fifth.
    assert all(wait >= 0.8 * least for wait, least in zip(waits, (0.2, 0.4, 0.8), strict=True)), waits
    assert psql(dsn, "SELECT count(*) FROM pgmb.order_queue_dead_letter_queue") == "1"
