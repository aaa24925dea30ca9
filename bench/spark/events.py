"""Events of about 200 bytes of JSON, made by the server itself."""

from __future__ import annotations

from typing import Any

import psycopg

COLUMNS = "topic, key, payload"
_CHUNK = 100_000


def select(first: int, last: int) -> str:
    """Events number `first` to `last`, each different."""
    return (
        "select 'order.created', 'customer-' || n % 5000, "
        'format(\'{"order":%s,"customer":"customer-%s","amount":%s,"currency":"EUR","note":"%s"}\', '
        f"n, n % 5000, n % 100000, rpad(md5(n::text), 120, 'x'))::json "
        f"from generate_series({first}, {last}) n"
    )


def fill(connection: psycopg.Connection[Any], stream: str, events: int) -> None:
    """Brings a stream to that many events, in many transactions, settled as a table is after a while."""
    for begin in range(0, events, _CHUNK):
        publish(connection, stream, begin + 1, min(events, begin + _CHUNK))
    connection.execute(f"vacuum (freeze, analyze) pgmb.log_{stream}")
    connection.execute("checkpoint")


def publish(connection: psycopg.Connection[Any], stream: str, first: int, last: int) -> None:
    """With ids that are stored: a source that knows the table alone has no others to give."""
    made = select(first, last)
    connection.execute(
        f"insert into pgmb.log_{stream} (id, {COLUMNS}) select gen_random_uuid(), made.* from ({made}) made"
    )
