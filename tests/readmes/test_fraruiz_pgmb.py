"""Every SQL example in the README of fraruiz/pgmb, as it stands there and in its order, in a fresh database.

But for CREATE EXTENSION: nothing of that kind is needed here.
"""

from __future__ import annotations

import subprocess
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import ClientCursor

from harness.postgres import binaries

REGISTER = """
SELECT pgmb.worker(
    'order_processor',                    -- worker name
    'http://localhost:8080/process',      -- endpoint URL
    100                                   -- requests per second limit
);
-- Returns: worker UUID
"""

CREATE = """
SELECT pgmb.create(
    'order_queue',                        -- queue name
    'order.*',                            -- binding key pattern (supports *)
    '550e8400-e29b-41d4-a716-446655440000', -- worker UUID
    5                                     -- max retries
);
-- Returns: queue UUID
"""

SIMPLE = """
-- Simple message
SELECT pgmb.send(
    gen_random_uuid(),
    'order.created',
    '{"order_id": 123, "amount": 45.67}'::jsonb
);
"""

WITH_HEADERS = """
-- With headers
SELECT pgmb.send(
    gen_random_uuid(),
    'order.created',
    '{"order_id": 123, "amount": 45.67}'::jsonb,
    '{"source": "web", "priority": "high"}'::jsonb
);
"""

DELAYED = """
-- Delayed message (10 minutes)
SELECT pgmb.send(
    gen_random_uuid(),
    'order.created',
    '{"order_id": 123, "amount": 45.67}'::jsonb,
    '{"source": "web"}'::jsonb,
    now() + interval '10 minutes'
);
"""

DELAYED_BY_SECONDS = """
-- Delayed message (600 seconds)
SELECT pgmb.send(
    gen_random_uuid(),
    'order.created',
    '{"order_id": 123, "amount": 45.67}'::jsonb,
    '{"source": "web"}'::jsonb,
    600
);
"""

REGISTER_ANOTHER = """
SELECT pgmb.worker('email_sender', 'http://api.example.com/send-email', 50);
"""

CREATE_IN_THE_OTHER_ORDER = """
SELECT pgmb.create('order_queue', 'order.*', 5, '550e8400-e29b-41d4-a716-446655440000');
"""

SEND = """
SELECT pgmb.send(
    gen_random_uuid(),
    'order.created',
    '{"order_id": 123}'::jsonb
);
"""

WORKERS = "SELECT * FROM pgmb.workers;"
QUEUES = "SELECT * FROM pgmb.queues;"
PENDING = "SELECT COUNT(*) FROM pgmb.order_queue WHERE acknoledge = false;"
DEAD = "SELECT * FROM pgmb.order_dead_letter_queue;"

EXAMPLES = [
    REGISTER,
    CREATE,
    SIMPLE,
    WITH_HEADERS,
    DELAYED,
    DELAYED_BY_SECONDS,
    REGISTER_ANOTHER,
    CREATE_IN_THE_OTHER_ORDER,
    SEND,
    WORKERS,
    QUEUES,
    PENDING,
    DEAD,
]

UNREGISTERED = UUID("550e8400-e29b-41d4-a716-446655440000")


@pytest.mark.parametrize("factory", [psycopg.Cursor, ClientCursor], ids=["extended", "simple"])
def test_each_example_does_what_the_text_beside_it_says(connect: Any, factory: Any) -> None:
    connection: psycopg.Connection[Any] = connect(cursor_factory=factory)
    warnings: list[str] = []
    connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))

    def value(example: str) -> Any:
        ((only,),) = connection.execute(example).fetchall()
        return only

    processor = value(REGISTER)
    assert isinstance(processor, UUID)
    queue = value(CREATE)
    assert isinstance(queue, UUID)
    assert len(warnings) == 1
    assert str(UNREGISTERED) in warnings[0]
    for example in (SIMPLE, WITH_HEADERS, DELAYED, DELAYED_BY_SECONDS):
        assert value(example) == ""
    sender = value(REGISTER_ANOTHER)
    assert value(CREATE_IN_THE_OTHER_ORDER) == queue
    assert value(SEND) == ""

    workers = connection.execute(WORKERS)
    assert [column.name for column in workers.description or ()] == [
        *("id", "name", "rps", "endpoint", "created_at", "last_heartbeat")
    ]
    assert {row[:4] for row in workers.fetchall()} == {
        (processor, "order_processor", 100, "http://localhost:8080/process"),
        (sender, "email_sender", 50, "http://api.example.com/send-email"),
    }
    queues = connection.execute(QUEUES)
    assert [column.name for column in queues.description or ()] == [
        *("id", "name", "binding_key", "worker_id", "max_retries", "created_at")
    ]
    assert [row[:5] for row in queues.fetchall()] == [(queue, "order_queue", "order.*", UNREGISTERED, 5)]
    assert value(PENDING) == 3
    dead = connection.execute(DEAD)
    assert dead.fetchall() == []
    assert [column.name for column in dead.description or ()][:7] == [
        *("id", "message_id", "acknoledge", "retries", "locked", "enqueued_at", "acknoledged_at")
    ]

    messages = connection.execute(
        "select routing_key, body, headers, enqueued_at > now() + interval '5 minutes' from pgmb.messages"
        " order by enqueued_at"
    ).fetchall()
    bought = {"order_id": 123, "amount": 45.67}
    assert messages == [
        ("order.created", bought, None, False),
        ("order.created", bought, {"source": "web", "priority": "high"}, False),
        ("order.created", {"order_id": 123}, None, False),
        ("order.created", bought, {"source": "web"}, True),
        ("order.created", bought, {"source": "web"}, True),
    ]
    received = "select topic, payload, headers from pgmb.receive('order_queue')"
    assert connection.execute(received).fetchall() == [message[:3] for message in messages[:3]]


def test_all_of_it_runs_in_psql(dsn: str) -> None:
    done = subprocess.run(
        [binaries(15) / "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", "-"],
        input="\n".join(EXAMPLES),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\n3\n" in done.stdout
