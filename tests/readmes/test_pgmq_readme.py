"""Every SQL and Python example in the early README of PGMQ, as it stands there, in a fresh database.

But for CREATE EXTENSION and the address of the database. The README creates `myqueue` and sends to `x`: here
both exist. Where it shows two rows of `pgmq_read('my_queue', 30, 1)`, a read of one, there is one row.
"""

from __future__ import annotations

import json
import pprint
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from harness.server import Server
from pgmb import schema


@pytest.fixture
def engine(server: Server, dsn: str) -> Iterator[Engine]:
    schema.install(dsn, compat=["pgmq"])
    with psycopg.connect(dsn, autocommit=True) as connection:
        database = connection.info.dbname
        connection.execute("select pgmq_create('x')")
    made = create_engine(server.url(database).replace("postgresql://", "postgresql+psycopg://"))
    # Its examples are transactions of their own, which nothing commits: its library then committed by itself.
    yield made.execution_options(isolation_level="AUTOCOMMIT")
    made.dispose()


def test_python_examples(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with engine.connect() as con:
        # create a queue
        created = con.execute(text( "select * from pgmq_create('myqueue');"))  # fmt: skip  # noqa: F841
        # list queues
        list_queues = con.execute(text( "select * from pgmq_list_queues()"))  # fmt: skip
        column_names = list_queues.keys()
        rows = list_queues.fetchall()
        print("### Queues ###")
        for row in rows:
            pprint.pprint(dict(zip(column_names, row)))  # noqa: B905
    assert set(column_names) == {"queue_name", "created_at"}
    assert {row.queue_name for row in rows} == {"x", "myqueue"}

    with engine.connect() as con:
        # send a message
        msg = json.dumps({"yolo": 42})
        msg_id = con.execute(text(f"select * from pgmq_send('x', '{msg}') as msg_id;"))
        column_names = msg_id.keys()
        rows = msg_id.fetchall()
        print("### Message ID ###")
        for row in rows:
            pprint.pprint(dict(zip(column_names, row)))  # noqa: B905
    assert "{'msg_id': 1}" in capsys.readouterr().out

    with engine.connect() as con:
        # read a message, make it unavailable to be read again for 5 seconds
        read = con.execute(text("select * from pgmq_read('x', 5);"))
        column_names = read.keys()
        rows = read.fetchall()
        print("### Read Message ###")
        for row in rows:
            pprint.pprint(dict(zip(column_names, row)))  # noqa: B905
    assert list(column_names) == ["msg_id", "read_ct", "vt", "enqueued_at", "message"]
    assert [(row.msg_id, row.read_ct, row.message) for row in rows] == [(1, 1, {"yolo": 42})]
    assert (rows[0].vt - rows[0].enqueued_at).total_seconds() > 4

    with engine.connect() as con:
        # delete a message
        deleted = con.execute(text("select pgmq_delete('x', 1);"))
        column_names = deleted.keys()
        rows = deleted.fetchall()
        print("### Message Deleted ###")
        for row in rows:
            pprint.pprint(dict(zip(column_names, row)))  # noqa: B905
    assert "{'pgmq_delete': True}" in capsys.readouterr().out


def test_sql_examples(engine: Engine, db: psycopg.Connection[Any]) -> None:
    def run(statement: str) -> tuple[list[str], list[Any]]:
        cursor = db.execute(re.sub(r"^pg\w+=# *", "", statement).encode())
        return [column.name for column in cursor.description or ()], cursor.fetchall()

    assert run("SELECT pgmq_create('my_queue');") == (["pgmq_create"], [("",)])
    assert run("pgmq=# \nSELECT * from pgmq_send('my_queue', '{\"foo\": \"bar\"}');") == (
        ["pgmq_send"],
        [(1,)],
    )
    assert run("SELECT * from pgmq_send('my_queue', '{\"foo\": \"bar\"}');") == (["pgmq_send"], [(2,)])
    columns, rows = run("pgmq=# SELECT * from pgmq_read('my_queue', 30, 1);")
    assert columns == ["msg_id", "read_ct", "vt", "enqueued_at", "message"]
    assert [(row[0], row[1], row[4]) for row in rows] == [(1, 1, {"foo": "bar"})]
    assert [row[0] for row in run("SELECT * from pgmq_read('my_queue', 30, 1);")[1]] == [2]
    assert run("pgx_pgmq=# SELECT * from pgmq_read('my_queue', 30, 1);")[1] == []
    run("select * from pgmq.set_vt('my_queue', array[1, 2]::bigint[], 0)")
    columns, rows = run("pgmq=# SELECT * from pgmq_pop('my_queue');")
    assert columns == ["msg_id", "read_ct", "vt", "enqueued_at", "message"]
    assert [(row[0], row[4]) for row in rows] == [(1, {"foo": "bar"})]
    assert run("pgmq=# select pgmq_delete('my_queue', 1);") == (["pgmq_delete"], [(False,)])
    assert run("select pgmq_archive('my_queue', 2);") == (["pgmq_archive"], [(True,)])
    assert run("select pgmq_delete('my_queue', 2);")[1] == [(False,)]
