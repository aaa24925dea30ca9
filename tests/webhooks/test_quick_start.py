"""The quick start of fraruiz/pgmb, end to end: psql, `pgmb dispatcher` and a small web server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from harness.answers import refusing
from harness.dispatchers import Dispatchers
from harness.postgres import binaries
from harness.receiver import ReceiverProcess
from harness.waiting import until_true

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


@pytest.fixture
def processor() -> Iterator[ReceiverProcess]:
    """Fails at one order."""
    with ReceiverProcess(("webhook-id",), {"process": partial(refusing, containing=b"500")}) as receiver:
        yield receiver


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


def test_worker_queue_send_receive_retry_bury(
    dsn: str, db: psycopg.Connection[Any], processor: ReceiverProcess
) -> None:
    psql(dsn, START.format(port=processor.port))

    def is_so(statement: str) -> bool:
        return db.execute(statement).fetchone() == (True,)

    with Dispatchers(dsn):
        until_true(lambda: is_so("select last_heartbeat is not null from pgmb.workers"))
        until_true(lambda: processor.count() >= 7)
        until_true(lambda: is_so("select exists (select from pgmb.order_dead_letter_queue)"))
        until_true(lambda: is_so("select not exists (select from pgmb.order_queue)"))
    requests = processor.requests()
    orders = [json.loads(request.body)["order_id"] for request in requests]
    assert sorted(orders) == [123, 124, 125, 500, 500, 500, 500]
    assert {request.path for request in requests} == {"/process"}
    failed = [request for request, order in zip(requests, orders, strict=True) if order == 500]
    assert {request.headers["webhook-id"] for request in failed} == {"550e8400-e29b-41d4-a716-446655440000"}
    waits = [later.at - earlier.at for earlier, later in pairwise(failed)]
    # Each is twice the one before, but for a fifth.
    assert all(wait >= 0.8 * least for wait, least in zip(waits, (0.2, 0.4, 0.8), strict=True)), waits
    assert psql(dsn, "SELECT count(*) FROM pgmb.order_queue_dead_letter_queue") == "1"
