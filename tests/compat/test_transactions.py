"""Promise: calls in one transaction see what the calls before them did, and undo none of it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

SMALL_READS = {
    "read": "select msg_id from pgmq.read(%s, 3600, 1)",
    "conditional read": """select msg_id from pgmq.read(%s, 3600, 1000, '{"kind": "other"}')""",
    "pop": "select msg_id from pgmq.pop(%s)",
    "grouped read": "select msg_id from pgmq.read_grouped(%s, 3600, 1)",
}


def ask(connection: psycopg.Connection[Any], statement: str, *arguments: Any) -> list[Any]:
    return [value for (value,) in connection.execute(statement.encode(), arguments).fetchall()]


def length(connection: psycopg.Connection[Any], queue: str) -> list[int]:
    return ask(connection, "select queue_length from pgmq.metrics(%s)", queue)


@pytest.mark.parametrize("small", SMALL_READS)
@pytest.mark.parametrize("count", [1, 5])
def test_an_empty_read_keeps_the_messages_of_a_read_before_it(
    sql: psycopg.Connection[Any], queue: str, small: str, count: int
) -> None:
    """The second read finds nothing in the log: it must not settle the messages that the first one holds."""
    sent = ask(sql, "select pgmq.send_batch(%s, array_fill('{}'::jsonb, array[%s]))", queue, count)
    with sql.transaction():
        assert ask(sql, "select msg_id from pgmq.read(%s, 3600, 1000)", queue) == sent
        assert ask(sql, SMALL_READS[small], queue) == []
        assert length(sql, queue) == [count]
    assert length(sql, queue) == [count]
    assert ask(sql, "select msg_id from pgmq.set_vt(%s, %s::bigint[], 0)", queue, sent) == sent
    assert ask(sql, "select msg_id from pgmq.read(%s, 3600, 1000)", queue) == sent


@pytest.mark.parametrize(
    "later", ["delete(%s, %s::bigint[])", "archive(%s, %s::bigint[])", "set_vt(%s, %s::bigint[], 60)"]
)
def test_a_deleted_message_is_found_by_no_later_call(
    sql: psycopg.Connection[Any], queue: str, later: str
) -> None:
    """Also where it was the only message of a large read."""
    sent = ask(sql, "select pgmq.send(%s, '{}')", queue)
    assert ask(sql, "select msg_id from pgmq.read(%s, 3600, 1000)", queue) == sent
    assert ask(sql, "select pgmq.delete(%s, %s::bigint)", queue, sent[0]) == [True]
    assert ask(sql, f"select count(*) from pgmq.{later}", queue, sent) == [0]
    assert ask(sql, f"select count(*) from pgmq.a_{queue}") == [0]
    assert length(sql, queue) == [0]
