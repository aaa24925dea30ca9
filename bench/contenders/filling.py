"""Backlogs: 500 events a transaction, as publishers would have left them."""

from __future__ import annotations

from typing import Any

import psycopg

from bench.payload import SIZE, payload

BATCH = 500


def fill(connection: psycopg.Connection[Any], insert: str, events: int) -> None:
    """Runs `insert` for every 500 events; it may use `body`, a payload, and `many`, how many to insert."""
    body = payload(0).decode()
    assert len(body) == SIZE
    connection.execute(
        f"""
        do $fill$
        declare
          body json := '{body}';
          many integer;
        begin
          for batch in 0 .. {(events - 1) // BATCH} loop
            many := least({BATCH}, {events} - batch * {BATCH});
            {insert};
            commit;
          end loop;
        end $fill$"""
    )
